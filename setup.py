"""Build of the extension modules: one kernel source, compiled once per instruction set; OpenMP where there is any."""

import gzip
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

DEBUG = os.environ.get("GDN_DEBUG") == "1"          # boundscheck and asserts, for `make debug`
SANITIZE = os.environ.get("GDN_SANITIZE", "")       # "address,undefined" or "thread", for `make asan` and `make tsan`
MACHINE = os.environ.get("_PYTHON_HOST_PLATFORM") or platform.machine()     # the former where it is built for another one
X86 = MACHINE.lower().endswith(("x86_64", "amd64", "i686"))
LEVELS = {"base": ["-march=x86-64-v2"], "v3": ["-march=x86-64-v3"], "v4": ["-march=x86-64-v4"]}
# A level's functions are what the source says: `cdef inline` is inlined, anything else a function of its own, so that none
# changes another's registers; and tiles become registers only when every loop over them, 8 rows at most, is unrolled,
# while those over a chunk's tokens are not.
KERNEL_FLAGS = ["-fno-inline-functions-called-once", "--param=max-completely-peeled-insns=1000",
                "--param=max-completely-peel-times=8", "-fno-tree-loop-distribute-patterns"]
MODULES = ("_tensor", "_core", "_ring")
HEADERS = [str(path) for folder in ("include", "core", "kernels", "ring", "native") for path in Path("gdn", folder).glob("*.h")]
NATIVE = sorted(Path("gdn/native").glob("*.c"))
LIBRARIES = sys.platform == "linux" and not DEBUG         # that build's checks raise Python's errors
VERSION = re.search(r'"(.+)"', Path("gdn/_version.py").read_text()).group(1)
BUILD = "build/debug/cython" if DEBUG else "build/cython"     # generated C stays out of the package
SANITIZE_FLAGS = [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g1",
                  "--param=asan-globals=0"] if SANITIZE else []    # a list of globals would keep all of Python's code in libgdn
# Of those flags, what only gcc knows, with what clang has instead.
CLANG_FLAGS = {**dict.fromkeys(KERNEL_FLAGS), "-Wno-discarded-qualifiers": "-Wno-incompatible-pointer-types-discards-qualifiers",
               "--param=asan-globals=0": "-fsanitize-address-globals-dead-stripping"}
OPENMP_SOURCE = "#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n"


def extension(name, compile_args=(), **kwargs):
    flags = ["-O0", "-g", "-UNDEBUG"] if DEBUG else ["-O1" if SANITIZE else "-O3", "-DNDEBUG"]
    flags += SANITIZE_FLAGS
    # Cython drops const, and int64_t is a long here and a long long there: %lld prints both.
    flags += ["-fvisibility=hidden", "-ffunction-sections", "-fdata-sections", "-fno-math-errno", "-Wno-unused-function",
              "-Wno-discarded-qualifiers", "-Wno-format", *compile_args]
    return Extension(
        f"gdn.{name}", [f"gdn/{name}.pyx"],
        include_dirs=["gdn/include", "gdn/core", "gdn/kernels", "gdn/ring", numpy.get_include()],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"), ("GDN_CFLAGS", f'"{" ".join(flags)}"')],
        extra_compile_args=flags, depends=HEADERS, **kwargs)


def extensions():
    modules = [extension(name) for name in MODULES]
    levels = LEVELS if X86 else {"base": []}
    for level, flags in levels.items():
        modules.append(extension(f"_level_{level}", [*KERNEL_FLAGS, *flags]))
        modules[-1].define_macros.append(("CYTHON_INLINE", "inline __attribute__((always_inline))"))
    return modules


def for_clang(flags):
    return [flag for flag in (CLANG_FLAGS.get(flag, flag) for flag in flags) if flag]


class BuildExt(build_ext):
    """Adds OpenMP's flags when a test program compiles and links with them; without them the build is serial.  Then links the
    modules' object files again, for hosts without Python."""

    openmp = ()

    def run(self):
        self.root = "" if self.inplace else self.build_lib        # setuptools builds elsewhere first, and copies modules
        super().run()

    def build_extensions(self):
        if sys.platform != "win32" and self.has_openmp():
            for ext in self.extensions:
                if ext.name == "gdn._core":
                    ext.extra_compile_args.append("-fopenmp")
                    ext.extra_link_args.append("-fopenmp")
            self.openmp = ("-fopenmp",)
        if self.is_clang():
            for ext in self.extensions:
                ext.extra_compile_args = for_clang(ext.extra_compile_args)
        super().build_extensions()
        if LIBRARIES and any(ext.name == "gdn._core" for ext in self.extensions):
            self.link_libraries(Path(self.root, "gdn", "lib"))

    def link_libraries(self, folder):
        """gdn/lib: libgdn.so and the plug-in of ggml, each with the calls and the kernels of every level inside."""
        flags = ["-std=gnu11", "-O2", "-fvisibility=hidden", "-ffunction-sections", "-Wall", "-Wextra", *SANITIZE_FLAGS]
        flags = for_clang(flags) if self.is_clang() else flags
        # The sanitizers' functions are clang's programs' own, gcc's libraries'.
        complete = "undefs" if SANITIZE and self.is_clang() else "defs"
        objects = [name for ext in self.extensions if ext.name != "gdn._tensor"
                   for name in self.compiler.object_filenames(ext.sources, output_dir=self.build_temp)]
        native = self.compiler.compile([str(path) for path in NATIVE], output_dir=self.build_temp, extra_postargs=flags,
                                       include_dirs=["gdn/include", "gdn/core", "gdn/kernels"], depends=HEADERS)
        folder.mkdir(parents=True, exist_ok=True)
        for name, only in (("libgdn.so", "gdn_get_api"), ("libggml-gdn.so", "ggml_backend_init")):
            exports = Path(self.build_temp, name + ".map")
            exports.write_text(f"{{ global: {only}; local: *; }};\n")
            own = [path for path in native if only == "ggml_backend_init" or "ggml" not in Path(path).name]
            self.compiler.link_shared_object(
                [*objects, *own], str(folder / name), libraries=["m", "pthread", "dl"],
                extra_postargs=[*self.openmp, *SANITIZE_FLAGS[:1], "-g" if SANITIZE else "-s", f"-Wl,--version-script={exports}",
                                f"-Wl,--gc-sections,-z,{complete},-z,nodelete,-soname,{name}"])
        for name in ("gdn.pc", "gdnConfig.cmake"):
            text = Path("gdn/native", name + ".in").read_text().replace("@VERSION@", VERSION)
            (folder / name).write_text(text)

    def is_clang(self):
        text = subprocess.run([self.compiler.compiler[0], "--version"], capture_output=True, text=True).stdout
        return "clang" in text

    def has_openmp(self):
        if "thread" in SANITIZE:
            print("gdn: no OpenMP, whose runtime ThreadSanitizer cannot see into; threads are the host's", file=sys.stderr)
            return False
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "openmp.c")
            source.write_text(OPENMP_SOURCE)
            try:
                objects = self.compiler.compile([str(source)], output_dir=folder, extra_postargs=["-fopenmp"])
                self.compiler.link_executable(objects, str(Path(folder, "openmp")), extra_postargs=["-fopenmp"])
            except Exception as error:
                print(f"gdn: no OpenMP ({error}); building without threads", file=sys.stderr)
                return False
        return True


class Sdist(sdist):
    """With SOURCE_DATE_EPOCH the archive's bytes follow from the sources alone."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        if "SOURCE_DATE_EPOCH" not in os.environ:
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)
        epoch = int(os.environ["SOURCE_DATE_EPOCH"])

        def settle(info):
            info.mtime, info.uid, info.gid, info.uname, info.gname = epoch, 0, 0, "", ""
            info.mode = 0o755 if info.isdir() or info.mode & 0o100 else 0o644
            return info

        path = base_name + ".tar.gz"
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with gzip.GzipFile(path, "wb", mtime=epoch) as file, tarfile.open(fileobj=file, mode="w") as tar:
            tar.add(base_dir, filter=settle)
        return path


directives = {"language_level": 3, "boundscheck": DEBUG, "wraparound": False, "cdivision": True,
              "initializedcheck": DEBUG, "freethreading_compatible": False}
# The Makefile links the source tree into its environment first and compiles in place after: once, and what changed.
modules = [] if os.environ.get("GDN_LINK_ONLY") == "1" else cythonize(
    extensions(), compiler_directives=directives, build_dir=BUILD, annotate=DEBUG)
setup(ext_modules=modules, cmdclass={"build_ext": BuildExt, "sdist": Sdist})
