"""Messages of jsonargparse become one line, and those about a wrong type have our form."""

from scanl.parsing import in_a_line


def test_a_message_becomes_one_line():
    assert in_a_line("  Unrecognized arguments:\n    --wide 3\n") == "Unrecognized arguments: --wide 3"


def test_a_value_of_a_wrong_type_is_said_as_elsewhere():
    message = (
        'Parser key "training.steps":\n  Does not validate against any of the Union subtypes\n'
        "  - Expected a <class 'int'>\n  - Expected a <class 'NoneType'>\n  Given value: many"
    )
    assert in_a_line(message) == "steps is many, expected an integer or none"
