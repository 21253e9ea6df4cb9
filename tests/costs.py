"""What each law costs of each layer and preset: a plugin of pytest that adds up the seconds of the cases."""

from collections import defaultdict

from scanl import layers

LAYER, PRESET = 3.5, 0.5  # seconds that the laws may take of one


class Costs:
    def __init__(self):
        self.seconds = defaultdict(float)  # by law and layer

    def pytest_runtest_logreport(self, report):
        law, _, case = report.nodeid.split("::")[-1].partition("[")
        name = self.layer(case.removesuffix("]"))
        if name is not None:
            self.seconds[law, name] += report.duration

    @staticmethod
    def layer(case):
        """The layer that a case is about: the longest registered name with which a part of its name begins."""
        found = [name for name in layers.names() for part in case.split("-") if f"{part}_".startswith(f"{name}_")]
        return max(found, key=len, default=None)

    def pytest_terminal_summary(self, terminalreporter):
        laws, each = defaultdict(float), defaultdict(float)
        for (law, name), seconds in self.seconds.items():
            laws[law] += seconds
            each[name] += seconds
        terminalreporter.section("what the laws cost of each layer, in seconds")
        dearest = sorted(laws, key=lambda law: -laws[law])[:8]
        write = terminalreporter.write_line
        for number, law in enumerate(dearest, 1):
            write(f"{number}: {law} {laws[law]:.1f}")
        write(f"{'layer':24}{'all':>8}" + "".join(f"{number:>8}" for number in range(1, len(dearest) + 1)))
        for name in sorted(each, key=lambda name: -each[name]):
            row = "".join(f"{self.seconds[law, name]:8.2f}" for law in dearest)
            write(f"{name:24}{each[name]:8.2f}{row}")
        mean = sum(each.values()) / max(len(each), 1)
        write(f"{'mean':24}{mean:8.2f}  (at most {LAYER} a layer and {PRESET} a preset)")
