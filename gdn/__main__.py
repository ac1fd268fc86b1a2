"""`python -m gdn info | check | bench | inspect FILE.gguf | config | llama`."""

import argparse
import sys


def info(args):
    from gdn._config import show_config
    show_config()
    return 0


def check(args):
    if args.types:
        from gdn._drift import run as drift
        return drift()
    from gdn._check import run
    return run(args.full)


def bench(args):
    from gdn._bench import run
    return run(args.seconds)


def inspect(args):
    from gdn.adapters.gguf import inspect
    print(inspect(args.file))
    return 0


def config(args):
    import os

    import gdn
    library = gdn.get_library()
    folder = os.path.dirname(library)
    print(*{"cflags": [f"-I{gdn.get_include()}"], "libs": [f"-L{folder}", f"-Wl,-rpath,{folder}", "-lgdn"],
            "library": [library], "cmakedir": [folder]}[args.what])
    return 0


def llama(args):
    import gdn
    path = gdn.get_ggml_backend()
    print(path if args.path else f"GGML_BACKEND_PATH={path}")
    return 0


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m gdn", description="Gated DeltaNet on the CPU")
    commands = parser.add_subparsers(required=True, dest="command")

    def command(function, text):
        sub = commands.add_parser(function.__name__, help=text, description=text)
        sub.set_defaults(run=function)
        return sub

    command(info, "version, level, threads and how the library was built")
    what = command(check, "the installed kernels against the float64 reference; exit status 1 on a miss")
    what = what.add_mutually_exclusive_group()
    what.add_argument("--full", action="store_true", help="every combination of the grid, a few minutes")
    what.add_argument("--types", action="store_true", help="how far states of each type drift over 4096 tokens")
    command(bench, "a quick table of what this machine does").add_argument(
        "--seconds", type=float, default=0.5, help="time spent on each row (0.5)")
    command(inspect, "the linear-attention layers of a GGUF file").add_argument("file", metavar="FILE.gguf")
    what = command(config, "what a C compiler and linker need").add_mutually_exclusive_group(required=True)
    for name, text in (("cflags", "flags that find gdn.h"), ("libs", "flags that link with libgdn.so"),
                       ("library", "path of libgdn.so"), ("cmakedir", "folder of gdnConfig.cmake, for -Dgdn_DIR")):
        what.add_argument(f"--{name}", dest="what", action="store_const", const=name, help=text)
    command(llama, "the plug-in that llama.cpp loads: what to put into its environment").add_argument(
        "--path", action="store_true", help="its path alone")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    try:
        return args.run(args)
    except (OSError, ValueError, ImportError) as error:
        print(f"gdn: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
