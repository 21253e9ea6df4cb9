"""Draw what HiPPO's memories hold of a sum of waves, and print the errors.

python -m scanl.inspect hippo.png [--size 64]
"""

import argparse

from scanl.inspect.reconstruction import save_reconstruction, waves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--size", type=int, default=64)
    options = parser.parse_args()
    for measure, error in save_reconstruction(options.path, waves(), options.size).items():
        print(f"{measure:8} {error:.4f}")


if __name__ == "__main__":
    main()
