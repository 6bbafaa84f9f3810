"""python main.py analysis | retry | agent [--scripted]"""

import sys

USAGE = "usage: python main.py analysis | retry | agent [--scripted]"


def main(argv: list[str]) -> int:
    match argv[:1]:
        case ["analysis"]:
            import analysis

            analysis.main()
        case ["retry"]:
            import retry

            retry.main()
        case ["agent"]:
            import agents

            agents.main(argv[1:])
        case _:
            print(USAGE, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
