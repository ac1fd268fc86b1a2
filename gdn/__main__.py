"""`python -m gdn info | check | bench | inspect FILE.gguf`."""

import argparse
import sys


def info(args):
    from gdn._config import show_config
    show_config()
    return 0


def check(args):
    from gdn._check import run
    return run(args.full)


def bench(args):
    from gdn._bench import run
    return run(args.seconds)


def inspect(args):
    from gdn.adapters.gguf import inspect
    print(inspect(args.file))
    return 0


def parse(argv):
    parser = argparse.ArgumentParser(prog="python -m gdn", description="Gated DeltaNet on the CPU")
    commands = parser.add_subparsers(required=True, dest="command")

    def command(function, text):
        sub = commands.add_parser(function.__name__, help=text, description=text)
        sub.set_defaults(run=function)
        return sub

    command(info, "version, level, threads and how the library was built")
    command(check, "the installed kernels against the float64 reference; exit status 1 on a miss").add_argument(
        "--full", action="store_true", help="every combination of the grid, a few minutes")
    command(bench, "a quick table of what this machine does").add_argument(
        "--seconds", type=float, default=0.5, help="time spent on each row (0.5)")
    command(inspect, "the linear-attention layers of a GGUF file").add_argument("file", metavar="FILE.gguf")
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
