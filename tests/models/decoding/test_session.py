"""Sessions, drafts and streams: whatever is read, kept, taken back or batched, the tokens are those of `generate`."""

import errno
import itertools
import os
import random
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import scanl
from scanl import layers
from scanl.errors import CheckpointError, ConfigError, DivergenceError, ShapeError
from scanl.files import temporary_path, written_whole
from scanl.layers.state import leaves, map_leaves
from scanl.models import LanguageModel, ModelDraft, PromptLookup, Session, Stack, StateStore, Streams
from scanl.models.decoding.drafts import Drafting
from scanl.models.decoding.prefix_tree import PrefixTree
from scanl.models.decoding.sampling import Choice
from scanl.models.decoding.state_files import write_text
from scanl.models.decoding.state_store import size_of
from scanl.models.decoding.streams import StreamsError

COVERS = [
    "models/decoding/cursor", "models/decoding/decodable", "models/decoding/drafts", "models/decoding/prefix_tree",
    "models/decoding/state_files", "models/decoding/state_store", "models/decoding/streams",
]  # fmt: skip

VOCAB = 20
FAMILIES = ["hawk", "gru", "mamba", "mamba2", "gla", "gated_deltanet", "rwkv7", "mlstm", "hgrn", "min_gru"]
OPTIONS = {"greedy": {"temperature": 0}, "drawn": {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "seed": 3}}


@pytest.fixture(autouse=True)
def _exact():
    with scanl.exact():
        yield


def model(layer="hawk", dim=12, depth=1, seed=0):
    torch.manual_seed(seed)
    return LanguageModel(VOCAB, Stack(dim, depth, layer, layer_options=dict(layers.get(layer).sample))).eval()


def text(length, seed=1):
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def drawn(model, prompt, count, **options):
    return [int(token) for token in itertools.islice(model.generate(prompt, **options), count)]


def counted(monkeypatch, model):
    """Return a list to which each call of the model adds the number of tokens that it reads."""
    lengths, read = [], model._hidden

    def hidden(tokens, *others):
        lengths.append(tokens.shape[1])
        return read(tokens, *others)

    monkeypatch.setattr(model, "_hidden", hidden)
    return lengths


DRAFTS = {"lookup": PromptLookup, "smaller": lambda: model("gru", 4, seed=1), "kept": lambda: ModelDraft(model())}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layer", FAMILIES)
def test_a_draft_changes_no_token(layer, options):
    large, draft = model(layer), {"greedy": PromptLookup(), "drawn": model("gru", 4, seed=1)}[options]
    options, prompt = OPTIONS[options], text(9)
    assert drawn(large, prompt, 16, draft=draft, **options) == drawn(large, prompt, 16, **options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_a_generation_with_a_draft_is_put_down_and_picked_up(draft, options):
    large, prompt, options = model(seed=2), text(5), dict(OPTIONS[options])
    whole = drawn(large, prompt, 24, **options)
    proposing, seed = DRAFTS[draft](), options.pop("seed", None)
    for length in (1, 8, 15):
        first = large.generate(prompt, seed=seed, draft=proposing, **options)
        tokens = [int(token) for token in itertools.islice(first, length)]
        rest = drawn(large, first.pending, 24 - length, state=first.state, seed=first.generator, **options)
        assert tokens + rest == whole


def cyclic():
    """Return a model in which 1 follows 0, 2 follows 1, 0 follows 2, and so on: a text of period 3."""
    made = model(dim=VOCAB)
    with torch.no_grad():
        for parameter in made.stack.blocks.parameters():
            parameter.zero_()
        made.embedding.weight.copy_(torch.eye(VOCAB))
        made.head.weight.zero_()
        made.head.weight[[1, 2, 0], [0, 1, 2]] = 1.0
    return made


def test_a_text_that_repeats_takes_few_calls(monkeypatch):
    periodic = cyclic()
    lengths = counted(monkeypatch, periodic)
    assert drawn(periodic, text(1) * 0, 60, temperature=0, draft=PromptLookup()) == [1, 2, 0] * 20
    assert len(lengths) < 12
    assert max(lengths) <= 16


def test_a_draft_that_fails_is_left_alone(monkeypatch):
    class Wrong:
        calls = 0

        def propose(self, text, count, choose):
            self.calls += 1
            return [19] * count

    periodic, wrong = cyclic(), Wrong()
    assert drawn(periodic, text(1) * 0, 99, temperature=0, draft=wrong) == [1, 2, 0] * 33
    assert 3 < wrong.calls < 12


def test_a_lookup_takes_the_latest_occurrence_of_the_longest_end():
    lookup = PromptLookup(longest=3, shortest=2)

    def proposed(*tokens):
        return lookup.propose(array("i", tokens), 4, lambda logits: logits)

    assert proposed(1, 2, 3, 4, 5, 9, 2, 3, 6, 7, 1, 2, 3) == [4, 5, 9, 2]  # three tokens before two
    assert proposed(2, 3, 4, 4, 4, 4, 2, 3, 6, 7, 8, 8, 2, 3) == [6, 7, 8, 8]  # the later one
    assert proposed(7, 7, 7) == [7, 7, 7, 7]  # a period shorter than the proposal
    assert proposed(1, 2, 3, 4) == proposed(3) == proposed() == []
    assert proposed(1 << 8, 1, 2, 1 << 16, 1 << 8, 3, 0, 1) == []  # bytes that fit, tokens that do not
    assert PromptLookup(window=4).propose(array("i", [1, 2, 3, 4, 4, 4, 1, 2]), 1, lambda logits: logits) == []


def test_a_right_proposal_is_followed_by_a_longer_one():
    drafting = Drafting(PromptLookup())
    drafting.learn(4, 4)
    assert len(drafting.propose(array("i", [5] * 9), 99, lambda logits: logits)) == 8
    assert len(drafting.propose(array("i", [5] * 9), 3, lambda logits: logits)) == 3
    drafting.learn(8, 2)
    assert len(drafting.propose(array("i", [5] * 9), 99, lambda logits: logits)) == 3
    drafting.learn(3, 0)
    assert [len(drafting.propose(array("i", [5] * 9), 99, lambda logits: logits)) for _ in range(3)] == [0, 0, 2]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("every", [4, 99])
def test_a_turn_costs_its_own_tokens(every, options, monkeypatch):
    large, options = model(depth=2), OPTIONS[options]
    session, whole = Session(large, every=every), text(0)
    lengths = counted(monkeypatch, large)
    for turn in range(6):
        prompt = text(3 + turn, seed=turn)
        whole = torch.cat([whole, prompt], 1)
        lengths.clear()
        tokens = drawn(large, prompt, 5, session=session, **options)
        assert sum(lengths) == 3 + turn + 4 + (turn > 0)  # and the last token of the turn before
        assert tokens == drawn(large, whole, 5, **options)
        whole = torch.cat([whole, torch.tensor([tokens])], 1)
        assert torch.equal(session.tokens, whole[0])
    assert torch.equal(session.pending, whole[:, -1:])
    assert size_of(session.state) == size_of(large.init_state(1))


def test_any_earlier_token_can_be_gone_back_to(monkeypatch):
    large, prompt = model(), text(37)
    session = Session(large, prompt, every=8)
    tokens = drawn(large, text(0), 20, session=session, temperature=0, draft=PromptLookup())
    lengths = counted(monkeypatch, large)
    for length in random.Random(0).sample(range(58), 8):
        other = session.fork()
        other.rewind(length)
        assert torch.equal(other.tokens, session.tokens[:length])
        lengths.clear()
        expected = drawn(large, torch.cat([other.tokens[None], prompt[:, :2]], 1), 3, temperature=0)
        assert sum(lengths) == length + 4
        lengths.clear()
        assert drawn(large, prompt[:, :2], 3, session=other, temperature=0) == expected
        assert sum(lengths) <= 8 + 15 + 4  # since a state in the store, which a draft may have passed
    assert session.tokens.tolist() == prompt[0].tolist() + tokens
    assert drawn(large, text(0), 3, session=session, temperature=0) == drawn(
        large, session.tokens[None, :57], 3, temperature=0
    )


@pytest.mark.parametrize("move", ["append", "take", "rewind"])
@pytest.mark.parametrize("taken", range(1, 5))
def test_a_draft_of_another_text_is_forgotten(taken, move):
    """A generation that is put down in the middle of a right draft leaves logits that belong to its text alone."""
    periodic = cyclic()
    session, begin = Session(periodic, every=4), torch.tensor([[0, 1, 2, 0, 1, 2, 0]])
    tokens = drawn(periodic, begin, taken, session=session, temperature=0, draft=PromptLookup())
    whole = [*begin[0].tolist(), *tokens]
    if move == "rewind":
        session.rewind(len(whole) - 1)
        whole.pop()
    elif move == "append":
        session.append([2, 2])
        whole += [2, 2]
    else:
        session.take(whole[-1])
        whole += [whole[-1]]
    assert session.tokens.tolist() == whole
    expected = drawn(periodic, torch.tensor([whole]), 4, temperature=0)
    assert expected[0] == (whole[-1] + 1) % 3
    assert drawn(periodic, text(0), 4, session=session, temperature=0) == expected


def test_a_text_is_gone_back_to_around_the_end_of_what_its_state_has_read():
    """At that very length its last token is pending again: some token always is."""
    large, prompt = model(), text(14)
    for read in (5, 8):
        for length in (0, read - 1, read, read + 1, 14):
            session = Session(large, prompt, every=4)
            session.read(read)
            session.rewind(length)
            assert session.pending.shape[1] >= (length > 0)
            assert torch.equal(session.pending[0], prompt[0, length - session.pending.shape[1] : length])
            tail = text(2, seed=length) if length % 2 or not length else text(0)
            expected = drawn(large, torch.cat([prompt[:, :length], tail], 1), 2, temperature=0)
            assert drawn(large, tail, 2, session=session, temperature=0) == expected


def test_forks_go_their_own_ways():
    large = model()
    session = Session(large, text(9))
    session.read()
    one, other = session.fork(), session.fork()
    assert session.pending.shape == one.pending.shape == (1, 1)
    for fork, seed in ((one, 1), (other, 2)):
        assert drawn(large, text(2), 9, session=fork, seed=seed) == drawn(
            large, torch.cat([text(9), text(2)], 1), 9, seed=seed
        )
    assert len(session) == 9


def test_a_text_that_begins_as_another_costs_what_follows(monkeypatch):
    large = model()
    store = StateStore(large)
    Session(large, text(40), store=store, every=8).read()
    lengths = counted(monkeypatch, large)
    session = Session(large, torch.cat([text(26), text(5, seed=9)], 1), store=store)
    assert drawn(large, text(0), 1, session=session, temperature=0)
    assert sum(lengths) == 26 + 5 - 24


def entries(store):
    return sorted(length for length, _ in store._tree.beginnings(array("i", range(200))))


def test_a_tree_finds_the_beginnings_of_a_text():
    draw, tree, sequences = random.Random(0), PrefixTree(), {}
    for i in range(300):
        sequence = array("i", [draw.randrange(2) for _ in range(draw.randrange(9))])
        if sequences and draw.random() < 0.4:
            key = draw.choice(list(sequences))
            tree.remove(sequences.pop(key))
        else:
            node = sequences[tuple(sequence)] = tree.insert(sequence)
            node.value = i
        looked_up = tuple(draw.randrange(2) for _ in range(9))
        expected = [(n, sequences[looked_up[:n]]) for n in range(10) if looked_up[:n] in sequences]
        assert list(tree.beginnings(array("i", looked_up))) == expected
    for node in sequences.values():
        tree.remove(node)
    assert not tree.root.children


def test_the_least_recently_used_states_go(tmp_path):
    large = model()
    state = large(text(3))[1]
    size = size_of(state)
    memory = StateStore(large, limit=3 * size)
    for length in (1, 2, 3):
        memory.put(array("i", range(length)), state)
    memory.longest(array("i", range(1)))
    memory.put(array("i", range(4)), state)
    assert entries(memory) == [1, 3, 4]
    assert (len(memory), memory.bytes_in_memory) == (3, 3 * size)
    disk = StateStore(large, limit=size, folder=tmp_path)
    for length in (1, 2, 3):
        disk.put(array("i", range(length)), state)
    assert (len(disk), disk.bytes_in_memory) == (3, size)
    files = sorted(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert disk.bytes_on_disk == sum(files)
    assert disk.longest(array("i", range(2)))[0] == 2
    small = StateStore(large, folder=tmp_path, folder_limit=sum(files[1:]))
    assert entries(small) == [2, 3]
    small.clear()
    assert not list(tmp_path.rglob("*.safetensors"))


def states(model, count):
    """Return the state after each of `count` beginnings of a text, by the number of tokens."""
    tokens = torch.arange(count)[None]
    return {length: model(tokens[:, :length])[1] for length in range(1, count + 1)}


def numbers(state):
    return torch.cat([leaf.flatten() for _, leaf in leaves(state)])


def test_a_store_has_states_of_its_own(tmp_path):
    """Whoever put a state may go on in its memory: a state in the store stays as it was put."""
    large = model()
    state = map_leaves(torch.clone, states(large, 1)[1])
    expected = numbers(state).clone()
    for options in ({}, {"folder": tmp_path}):
        store, own = StateStore(large, **options), map_leaves(torch.clone, state)
        store.put(array("i", [0]), own)
        map_leaves(lambda leaf: leaf.zero_(), own)
        assert torch.equal(numbers(store.longest(array("i", [0]))[1]), expected)


def test_the_order_of_use_outlives_a_process(tmp_path):
    large = model()
    first = StateStore(large, folder=tmp_path)
    for length, state in states(large, 4).items():
        first.put(array("i", range(length)), state)
    first.longest(array("i", range(1)))
    first.put(array("i", range(2)), state)
    sizes = {path.stat().st_size for path in tmp_path.rglob("*.safetensors")}
    small = StateStore(large, folder=tmp_path, folder_limit=2 * max(sizes))
    assert entries(small) == [1, 2]


def test_files_that_change_places_are_refused(tmp_path):
    """Each file fits its own digest, and the states are those of the other text."""
    large, state = model(), states(model(), 1)[1]
    store = StateStore(large, limit=size_of(state), folder=tmp_path)
    for token in range(3):
        store.put(array("i", [token]), state)
    last = StateStore(large, folder=tmp_path)
    one, two, _ = sorted(store.folder.iterdir())
    for path, to in ((one, "spare"), (two, one.name), (one.with_name("spare"), two.name)):
        path.rename(path.with_name(to))
    with pytest.warns(UserWarning, match="holds another text; the file is removed, and the state is computed again"):
        lengths = [last.longest(array("i", [token]))[0] for token in range(3)]
    assert sorted(lengths) == [0, 0, 1]
    assert len(list(store.folder.iterdir())) == 1


def test_processes_share_a_folder_while_they_run(tmp_path):
    """Two stores stand for two processes: each finds the other's states, and they keep one limit."""
    large, known = model(), states(model(), 6)
    size = len(write(large, known[1], tmp_path / "other"))
    one, other = (StateStore(large, folder=tmp_path, folder_limit=3 * size + 99) for _ in range(2))
    one.put(array("i", range(1)), known[1])
    length, state = other.longest(array("i", range(5)))
    assert length == 1
    assert torch.equal(numbers(state), numbers(known[1]))
    for length in (2, 3):
        other.put(array("i", range(length)), known[length])
    one.longest(array("i", range(1)))
    other.put(array("i", range(4)), known[4])  # the last used are 1, 3 and 4
    assert entries(StateStore(large, folder=tmp_path)) == [1, 3, 4]
    assert other.bytes_on_disk == sum(path.stat().st_size for path in other.folder.iterdir()) <= other.folder_limit
    one.clear()
    assert not list(other.folder.iterdir())
    other.put(array("i", range(4)), known[4])  # what another process has removed is written again
    assert entries(StateStore(large, folder=tmp_path)) == [4]


def test_processes_that_write_at_once_keep_one_limit(tmp_path, monkeypatch):
    large, known = model(), states(model(), 2)
    size = len(write(large, known[1], tmp_path / "other"))
    one, other = (StateStore(large, folder=tmp_path, folder_limit=size + 99) for _ in range(2))

    def late(*arguments):
        monkeypatch.undo()
        write_text(*arguments)
        other.put(array("i", range(2)), known[2])

    monkeypatch.setattr("scanl.models.decoding.state_store.write_text", late)
    one.put(array("i", range(1)), known[1])
    assert len(list(one.folder.iterdir())) == 1


def test_threads_that_write_one_path_keep_it_whole(tmp_path):
    """Each of two threads has written half when the other begins."""
    path, together = tmp_path / "file", threading.Barrier(2)

    def work(letter):
        with written_whole(path) as temporary, temporary.open("wb") as file:
            file.write(letter * 5)
            file.flush()
            together.wait(10)
            file.write(letter * 5)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, [b"a", b"b"]))
    assert path.read_bytes() in (b"a" * 10, b"b" * 10)
    assert list(tmp_path.iterdir()) == [path]


def write(model, state, folder):
    """Return the bytes of the one file that a store writes for the state of a text of one token."""
    StateStore(model, folder=folder).put(array("i", [0]), state)
    (path,) = folder.rglob("*.safetensors")
    return path.read_bytes()


def test_a_file_that_another_process_is_writing_is_left_alone(tmp_path):
    large, state = model(), states(model(), 1)[1]
    store = StateStore(large, folder=tmp_path)
    now, old = (temporary_path(store.folder / "0.safetensors") for _ in range(2))
    for path in (now, old):
        path.write_bytes(b"half of a st")
    os.utime(old, (0, 0))  # of a process that was killed
    store.put(array("i", [0]), state)
    assert now.exists()
    again = StateStore(large, folder=tmp_path, folder_limit=store.bytes_on_disk)
    assert entries(again) == [1]
    assert now.exists()
    assert not old.exists()


def test_a_file_that_cannot_be_opened_is_not_damaged(tmp_path, monkeypatch):
    """A process without descriptors left reads no file, and must not remove it either."""
    large, state = model(), states(model(), 1)[1]
    StateStore(large, folder=tmp_path).put(array("i", [0]), state)
    store = StateStore(large, folder=tmp_path)

    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.warns(UserWarning, match=r"Too many open files.*; the state is computed again"):
        assert store.longest(array("i", [0])) == (0, None)
    monkeypatch.undo()
    assert store.longest(array("i", [0]))[0] == 1


@pytest.mark.parametrize("layer", ["hawk", "gated_deltanet", "s5"])
def test_a_session_goes_on_in_another_process(layer, tmp_path):
    """A store and a session are made anew from their files, as another process would."""
    large, prompt = model(layer), text(20)
    session = Session(large, store=StateStore(large, folder=tmp_path), every=8)
    expected = drawn(large, prompt, 12, session=session, temperature=0)
    session.save(tmp_path / "session.safetensors")
    expected += drawn(large, text(2), 6, session=session, temperature=0)
    same = model(layer)
    loaded = Session.load(tmp_path / "session.safetensors", same, every=8)
    assert drawn(same, text(2), 6, session=loaded, temperature=0) == expected[12:]
    begun = Session(same, torch.cat([prompt, torch.tensor([expected[:5]])], 1), store=StateStore(same, folder=tmp_path))
    assert begun.pending.shape == (1, 1)
    assert drawn(same, text(0), 7, session=begun, temperature=0) == expected[5:12]


def spoiled(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_damaged_state_is_refused(tmp_path):
    large = model()
    session = Session(large, text(17), store=StateStore(large, folder=tmp_path), every=8)
    session.read()
    session.save(tmp_path / "session")
    size = (tmp_path / "session").stat().st_size
    for at in random.Random(0).sample(range(size), 12):
        spoiled(tmp_path / "session", at)
        with pytest.raises(CheckpointError, match=r"is damaged|cannot be read|other weights"):
            Session.load(tmp_path / "session", large)
        spoiled(tmp_path / "session", at)
    for at, problem in ((-1, "its name does not fit its text"), (-100, "its bytes do not fit its digest")):
        store = StateStore(large, folder=tmp_path)
        again = Session(large, text(17), store=store, every=8)
        again.read()  # what was removed is written again
        last = max(tmp_path.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
        spoiled(last, at)
        with pytest.warns(
            UserWarning, match=f"{last.name} is damaged: {problem}.*; the file is removed, and the state"
        ):
            again = Session(large, text(17), store=StateStore(large, folder=tmp_path))
        assert again.pending.shape == (1, 9)
        assert not last.exists()
        assert drawn(large, text(0), 5, session=again, temperature=0) == drawn(large, text(17), 5, temperature=0)
    cut = next(tmp_path.rglob("*.safetensors"))
    cut.write_bytes(cut.read_bytes()[:40])
    with pytest.warns(UserWarning, match=f"{cut.name} cannot be read, or is damaged"):
        StateStore(large, folder=tmp_path)


def test_states_of_other_weights_are_not_taken(tmp_path):
    large, other = model(), model(seed=1)
    session = Session(large, text(17), store=StateStore(large, folder=tmp_path), every=8)
    session.read()
    session.save(tmp_path / "session")
    with pytest.raises(CheckpointError, match="session is of another model or of other weights"):
        Session.load(tmp_path / "session", other)
    assert len(StateStore(other, folder=tmp_path)) == 0


def test_a_folder_that_is_full_does_not_end_a_text(tmp_path):
    large = model()
    store = StateStore(large, folder=tmp_path)
    (tmp_path / store.folder.name).rmdir()
    with pytest.warns(UserWarning, match="cannot be written: .*No such file .*; the state is in memory alone"):
        Session(large, text(9), store=store, every=8).read()
    assert len(store) == 1


@pytest.mark.parametrize("layer", ["hawk", "gla", "mlstm"])
def test_streams_are_as_each_alone(layer):
    large, draw, live = model(layer), random.Random(0), {}
    streams = Streams(large, piece=9)
    for step in range(14):
        if draw.random() < 0.5:
            prompt, options = text(draw.randrange(1, 24), seed=step), OPTIONS[draw.choice(list(OPTIONS))]
            live[streams.join(prompt, **options)] = prompt, options, []
        for handle, token in streams.step().items():
            live[handle][2].append(token)
        assert len(streams) == len(live)
        if live and (draw.random() < 0.3 or step > 11):
            handle = draw.choice(list(live))
            prompt, options, tokens = live.pop(handle)
            session = streams.leave(handle)
            assert tokens == drawn(large, prompt, len(tokens), **options)
            assert session.tokens.tolist() == prompt[0].tolist() + tokens
            following = drawn(large, session.tokens[None], 3, temperature=0)
            again = streams.join(session=session, temperature=0)
            live[again] = torch.tensor([session.tokens.tolist()]), {"temperature": 0}, []
            assert drawn(large, text(0), 3, session=session.fork(), temperature=0) == following


def test_a_long_prompt_lets_the_others_go_on():
    large = model()
    streams = Streams(large, piece=8)
    first = streams.join(text(3), temperature=0)
    assert streams.step().keys() == {first}
    second = streams.join(text(30), temperature=0)
    assert [sorted(streams.step()) for _ in range(4)] == [[first]] * 3 + [[first, second]]
    both = [streams.join(text(6), temperature=0) for _ in range(2)]  # of which a step reads one and a third
    assert [sorted(streams.step().keys() & both) for _ in range(2)] == [both[:1], both]


def test_a_session_in_a_stream_keeps_states_to_go_back_to():
    """Those of every 8 tokens, and the one before a prompt."""
    large = model()
    streams, session = Streams(large), Session(large, text(3), every=8)
    handle = streams.join(session=session, temperature=0)
    for _ in range(30):
        streams.step()
    streams.leave(handle)
    lengths = range(9, 33)
    unread = [Session(large, session.tokens[:n], store=session.store).pending.shape[1] for n in lengths]
    assert unread == [(n - 1) % 8 + 1 for n in lengths]
    once = Session(large, text(4))
    drawn(large, text(0), 3, session=once, temperature=0)
    streams.join([1, 2], session=once)
    assert Session(large, once.tokens, store=once.store).pending.shape[1] == 3  # and the last token before


REFUSED = [
    (
        lambda m: m.generate(text(2), m.init_state(1), session=Session(m)),
        ConfigError,
        "state and session are both given",
    ),
    (lambda m: m.generate(text(2), session=Session(model())), ConfigError, "session is of another model"),
    (lambda m: m.generate(text(0), session=Session(m)), ShapeError, r"prompt has shape \(1, 0\), expected \(B, T\)"),
    (
        lambda m: m.generate(text(4).view(2, 2), draft=PromptLookup()),
        ShapeError,
        r"prompt is torch.int64 \(2, 2\), expect",
    ),
    (
        lambda m: m.generate(text(2) + VOCAB, session=Session(m)),
        ShapeError,
        "prompt has token .*, expected 0 to 19 of 20",
    ),
    (
        lambda m: m.generate(text(2), mask=text(2) > -1, draft=m),
        ShapeError,
        "mask is given, expected none because of draft",
    ),
    (lambda m: m.generate(text(2), draft="ngram"), ConfigError, r"draft is a str, expected PromptLookup\(\)"),
    (
        lambda m: m.generate(text(2), draft=LanguageModel(9, Stack(8, 1))),
        ConfigError,
        "draft has vocab_size=9, expected 20 of the model",
    ),
    (lambda m: Session(m, every=0), ConfigError, "session: every is 0, expected at least 1"),
    (lambda m: Session(m, [0.5]), ShapeError, r"session: tokens is torch.float32 \(1,\), expected integers"),
    (lambda m: Session(m, store=StateStore(model())), ConfigError, "session: store is of another model"),
    (lambda m: Session(m, [1, 2]).rewind(3), ConfigError, "rewind: length is 3, expected at most 2"),
    (lambda m: StateStore(m, limit=5), ConfigError, "state store: limit is 5, expected at least"),
    (lambda m: PromptLookup(longest=1), ConfigError, "prompt lookup: longest is 1, expected at least 2"),
    (lambda m: Streams(m).join(), ShapeError, "join: prompt has no token, expected at least 1"),
    (lambda m: Streams(m).join([1], temperature=-1), ConfigError, "join: temperature is -1, expected at least 0"),
    (lambda m: Streams(m).join([1], session=Session(model())), ConfigError, "join: session is of another model"),
    (lambda m: Streams(m).leave(3), ConfigError, "leave: handle is 3, expected that of a stream"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_wrong_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(model())


def test_a_session_is_in_one_stream_alone():
    large = model()
    streams, session = Streams(large), Session(large, text(3))
    streams.join(session=session)
    with pytest.raises(ConfigError, match="session is that of another stream"):
        streams.join(session=session)


@pytest.mark.parametrize("every", [5, 99])
def test_a_rewind_to_what_the_state_has_read(every):
    large = model()
    session = Session(large, text(6), every=every)
    session.read()
    assert session.pending.shape == (1, 1)
    session.rewind(5)
    assert session.pending.shape[1] >= 1
    assert drawn(large, text(0), 4, session=session, temperature=0) == drawn(large, text(6)[:, :5], 4, temperature=0)


def test_logits_of_a_draft_are_of_the_text_before_an_append():
    large = model()
    session = Session(large, torch.tensor([[1, 2, 3, 1, 2]]))
    greedy = Choice(0.0)
    continued = drawn(large, torch.tensor([[1, 2, 3, 1, 2]]), 3, temperature=0)

    class Right:
        def propose(self, text, count, choose):
            return continued[:count]

    with torch.inference_mode():
        session.draw(greedy, Drafting(Right()))
        session.append([4])
        following = int(session.draw(greedy))
    assert following == drawn(large, session.tokens[None, :-1], 1, temperature=0)[0]


@pytest.mark.parametrize("size", [4, 5])
def test_a_draft_that_passes_a_multiple_leaves_a_state(size):
    """Of 8 tokens, after which the last draft of the twelve was taken whole."""
    large = model()
    tokens = drawn(large, text(size), 12, temperature=0)

    class Right:
        def propose(self, text, count, choose):
            return tokens[len(text) - size :][:count]

    session, drafting = Session(large, text(size), every=8), Drafting(Right())
    with torch.inference_mode():
        for _ in range(12):
            session.draw(Choice(0.0), drafting)
    assert session.tokens.tolist() == text(size)[0].tolist() + tokens
    assert Session(large, session.tokens, store=session.store).pending.shape[1] <= size + 12 - 8


def test_the_last_tokens():
    session = Session(model(), [1, 2, 3])
    assert [session.last(n) for n in (0, 2, 3, 4, 9)] == [[], [2, 3], *[[1, 2, 3]] * 3]


def spoiled_at(token):
    """A model whose logits are NaN once it has read this token."""
    large = model()
    large.embedding.weight.data[token] = torch.nan
    return large


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_that_is_not_finite_leaves_the_others(temperature, monkeypatch):
    large = spoiled_at(19)
    streams = Streams(large, piece=64)
    one = streams.join([1, 2], temperature=0)
    bad = streams.join([3, 19], temperature=temperature)
    seed = next(seed for seed in range(99) if 19 not in drawn(model(), torch.tensor([[4, 5]]), 7, seed=seed))
    other = streams.join([4, 5], seed=seed)
    with pytest.raises(
        StreamsError, match=f"stream {bad}: sample: the largest logit of the next token is nan"
    ) as caught:
        streams.step()
    assert caught.value.errors.keys() == {bad}
    assert isinstance(caught.value.errors[bad], DivergenceError)
    tokens = {handle: [token] for handle, token in caught.value.tokens.items()}
    assert tokens.keys() == {one, other}
    late = streams.join([6], temperature=temperature, seed=2, top_k=2)
    tokens[late] = []
    assert len(streams) == 4
    for step in range(6):
        if step == 3:  # a row of the batch, between others
            monkeypatch.setattr(large, "decode_logits", nan_in_row(large.decode_logits, 2))
            with pytest.raises(StreamsError) as caught:
                streams.step()
            monkeypatch.undo()
            assert caught.value.errors.keys() == {late}
            stepped = caught.value.tokens
        else:
            stepped = streams.step()
        for handle, token in stepped.items():
            tokens[handle].append(token)
    assert tokens[one] == drawn(large, torch.tensor([[1, 2]]), 7, temperature=0)
    assert tokens[other] == drawn(large, torch.tensor([[4, 5]]), 7, seed=seed)
    assert tokens[late] == drawn(large, torch.tensor([[6]]), 3, temperature=temperature, seed=2, top_k=2)
    session = streams.leave(late)
    assert session.tokens.tolist() == [6, *tokens[late]]
    following = drawn(large, session.tokens[None], 3, temperature=0)
    assert drawn(large, text(0), 3, session=session, temperature=0) == following
    assert streams.leave(bad).tokens.tolist() == [3, 19]
    assert len(streams) == 2


def nan_in_row(decode, row):
    def decode_logits(tokens, state, **options):
        logits, after = decode(tokens, state, **options)
        logits[row] = torch.nan
        return logits, after

    return decode_logits


def test_a_prompt_that_cannot_be_read_leaves_the_others(monkeypatch):
    large = model()
    streams = Streams(large, piece=8)
    one, session = streams.join(text(3), temperature=0), Session(large, [1, 2])
    streams.step()
    bad, other = streams.join(text(30), session=session), streams.join(text(4, seed=1), temperature=0)
    read = large.next_logits

    def fails(tokens, state=None, **options):
        if tokens.shape[1] > 4:
            raise MemoryError("for this test")
        return read(tokens, state, **options)

    monkeypatch.setattr(large, "next_logits", fails)
    with pytest.raises(StreamsError, match=f"stream {bad}: for this test") as caught:
        streams.step()
    assert caught.value.tokens.keys() == {one, other}
    assert streams.step().keys() == {one, other}
    with pytest.raises(ConfigError, match="session is that of another stream"):
        streams.join(session=session)
    assert streams.leave(bad) is session


def test_a_session_that_is_not_finite_keeps_its_text():
    large = spoiled_at(19)
    session = Session(large, [1, 2])
    with pytest.raises(DivergenceError, match="the largest logit of the next token is nan, expected a finite number"):
        drawn(large, torch.tensor([[19]]), 1, session=session, temperature=0)
    assert session.tokens.tolist() == [1, 2, 19]
    session.rewind(2)
    assert drawn(large, torch.tensor([[3]]), 3, session=session, temperature=0) == drawn(
        large, torch.tensor([[1, 2, 3]]), 3, temperature=0
    )
