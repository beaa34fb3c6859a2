"""One command for each comparison on a CPU.

python -m benchmarks.cpu limit       plain decoding and trees against one read of the weights
python -m benchmarks.cpu products    the linear layers alone: torch's, packed, by our kernels
python -m benchmarks.cpu llama       llama.cpp on the same weights, alone and with a draft model
python -m benchmarks.cpu families    trained drafters, packed and not; transformers' own speculation
"""

import argparse

from headstart.heads.core import use_physical_cores

from . import families, limit, llama, products


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = parser.add_subparsers(required=True, metavar="limit|products|llama|families")
    for module in (limit, products, llama, families):
        name = module.__name__.rpartition(".")[2]
        part = parts.add_parser(name, description=module.__doc__)
        module.add_arguments(part)
        part.add_argument("--json", action="store_true", help="print one JSON document")
        part.set_defaults(run=module.run)
    use_physical_cores()
    options = parser.parse_args(argv)
    options.run(options)


if __name__ == "__main__":
    main()
