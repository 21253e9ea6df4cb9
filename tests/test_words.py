"""The counts of `words.py`: it sees each kind of word, and a count that is not its budget fails."""

import tomllib

import words

SAMPLE = '''
class ColourMap:
    """The map of images: their number is
    of no matter."""

    def draw(self, found):
        self.colour = "is of no matter"  # a name in a string is no name: found
        for _each in found:  # such
            # a number
            yield _each
'''


def test_a_word_is_counted_where_the_module_defines_or_says_it():
    kinds = {"names": ["found", "each"], "phrases": ["is of", "such a"], "british": ["colour"]}
    assert words.occurrences(SAMPLE, kinds, "colours") == {
        ("british", "colour"): [1, 2, 7],
        ("names", "found"): [6],
        ("names", "each"): [8],
        ("phrases", "is of"): [3],
        ("phrases", "such a"): [7],
    }


def test_a_count_that_is_not_its_budget_fails():
    places = {("names", "found"): ["a.py:1", "b.py:2"]}
    assert words.complaints(places, {"names": {"found": 2, "each": 0}}) == []
    (over,) = words.complaints(places, {"names": {"found": 1}})
    assert over.startswith("names: 'found' occurs 2 times in src/scanl, its budget is 1;")
    assert over.endswith(": a.py:1, b.py:2")
    (under,) = words.complaints(places, {"names": {"found": 3}})
    assert under.endswith("; lower the budget: python tests/words.py --lower")


def test_the_library_keeps_its_budgets():
    budgets = tomllib.loads(words.BUDGETS.read_text("utf-8"))
    assert words.complaints(words.everywhere(budgets), budgets) == []
