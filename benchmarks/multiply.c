/* x *= a on several threads: the pass over memory that a decode step on as many is measured against. */
#include <stddef.h>

void multiply(float *x, size_t n, float a, int n_threads)
{
    #pragma omp parallel for num_threads(n_threads) schedule(static)
    for (size_t i = 0; i < n; i++)
        x[i] *= a;
}
