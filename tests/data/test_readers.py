"""What readers of published files make of them, number by number. The laws of all sources are in test_sources.py."""

import gzip
import itertools
import pickle
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import blosc
import numpy as np
import pytest
import torch
import zstandard

import published
from scanl.data import Source, sources
from scanl.data.batch import Batch
from scanl.data.files import folders
from scanl.data.fixed import FixedPart, FromFiles
from scanl.data.published import audio
from scanl.data.questions import FeatureInputs, Flags
from scanl.data.readers.pickles import plain
from scanl.errors import ConfigError, DataError
from scanl.learning import TrainConfig
from scanl.learning.questions import answerer
from scanl.models import Stack

COVERS = [
    "data/published/atari", "data/published/audio", "data/published/babyai", "data/published/choices",
    "data/published/contours", "data/published/documents", "data/fixed", "data/published/language",
    "data/published/music", "data/published/photographs", "data/published/pile", "data/readers/*",
    "data/published/classified_series", "data/published/timit", "data/published/translation", "data/published/videos",
    "data/published/yes_no",
]  # fmt: skip


@pytest.fixture
def root(tmp_path, monkeypatch):
    """An empty folder of data sets, whose digests and counts are not known."""
    return published.root(tmp_path, monkeypatch)


def source(name: str, **options: Any) -> Source:
    """A source that reads the small files."""
    short = {key: options.pop(key) for key in ("sequence_length", "eval_examples") if key in options}
    return TrainConfig.of(
        data=[name], data_options={**published.OPTIONS.get(name, {}), **options}, **short
    ).open_source()


# Sound.


def test_coefficients_are_those_of_torchaudio():
    """Numbers of torchaudio 2.11, MFCC(n_mfcc=20, log_mels=True, melkwargs={"n_fft": 200, "n_mels": 64})."""
    found = audio.mfcc(torch.sin(torch.arange(16000.0) ** 1.3 * 0.001)[None])[0]
    golden = torch.tensor([[-75.761879, 27.238495, 5.381627], [-83.441833, 29.882196, 13.941297]])
    assert found.shape == (161, 20)
    torch.testing.assert_close(found[:2, :3], golden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[160, 19], torch.tensor(0.235993), rtol=1e-3, atol=1e-3)
    assert float(found.double().abs().sum()) == pytest.approx(25206.276, rel=1e-5)


def test_ten_words_are_whole_clips_standardised_at_each_position(root):
    folder = published.written(root, "speech_commands")
    found = source("sc10")
    assert [len(part.answers) for part in found.parts] == [30, 10, 10]  # five of seven clips of a word have 20 samples
    assert all(np.bincount(part.answers).tolist() == [len(part.answers) // 10] * 10 for part in found.parts)
    clips = np.stack(list(found.parts.train.rows)) / 2.0**15
    batch = found.form(list(found.parts.test.rows))
    test = np.stack(list(found.parts.test.rows)) / 2.0**15
    np.testing.assert_allclose(batch[..., 0], (test - clips.mean(0)) / (clips.std(0) + 1e-5), rtol=1e-4, atol=1e-5)
    for word in audio.TEN:  # coefficients need clips that are longer than half a window
        for number in range(4):
            published.wav(folder / word / f"{number}b_nohash_0.wav", published.random(number + 1, 600)[-1].tobytes())
    found = source("sc10", max_length=300, mfcc=True)
    assert found.batch(0, 2).inputs.shape == (2, 4, 20)
    every = np.concatenate(list(found.form([found.parts.train.rows[i] for i in range(len(found.parts.train.rows))])))
    np.testing.assert_allclose(every.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(every.std(0), 1, rtol=1e-3)


def test_recordings_are_cut_into_pieces_and_quantised(root):
    """17 files in natural order, 14, 1 and 2 of them, each of 100 samples: two pieces of 40."""
    folder = published.written(root, "beethoven")
    found = source("beethoven")
    assert [len(part.answers) for part in found.parts] == [28, 2, 4]
    samples = published.random(15, 200)[-1].view("<i2").astype(float)  # of beethoven14.wav, behind 9 and 13
    batch = next(iter(found.unseen(0)))
    u = (samples[40:80] - samples[40:80].min()) / np.ptp(samples[40:80])
    np.testing.assert_array_equal(batch.targets[1], np.floor(u * 255.99 + 0.005))
    np.testing.assert_array_equal(batch.inputs[1], [128, *batch.targets[1, :-1]])
    folder = published.written(root, "youtubemix")
    batch = next(iter(source("youtubemix").unseen(0)))
    np.testing.assert_array_equal(batch.targets[0], audio.mu_law(samples[:40]))
    path = folder / "youtubemix" / "youtubemix3.wav"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"youtubemix3.wav is damaged: it ends after 50 samples"):
        source("youtubemix").batch(0, 28)
    with pytest.raises(ConfigError, match="piece is 0, expected at least 1"):
        source("youtubemix", piece=0)


def test_frames_of_a_sentence_predict_the_next(root):
    """The level of a tone of 1 kHz is that of the window's sum, in the bin of 1 kHz; a tone of 5 kHz is gone."""
    folder = published.written(root, "timit")
    found = source("timit")
    assert [len(part.answers) for part in found.parts] == [6, 4, 4]
    assert source("timit", exchanged=True).parts.test.rows.paths == found.parts.validation.rows.paths
    assert {path.parent.name for path in found.parts.test.rows.paths} == {"MDAB0"}
    t = np.arange(3200)
    levels = []
    for hertz in (1000, 5000):
        tone = np.round(2**13 * np.sin(2 * np.pi * hertz / 16000 * t))
        (folder / "TRAIN" / "DR1" / "FCJF0" / "SI0.WAV").write_bytes(published.sphere(tone))
        frames = found.frames(folder / "TRAIN" / "DR1" / "FCJF0" / "SI0.WAV")
        assert frames.shape == (1 + 1600 // 128, 129)
        levels.append(frames[3:-3])
    assert set(levels[0].argmax(1)) == {32}
    np.testing.assert_allclose(levels[0].max(1), 20 * np.log10(0.25 / 2 * 128), atol=0.05)
    assert levels[1].max() < levels[0].max() - 50
    batch = found.batch(0, 6)
    assert batch.inputs.shape == (6, found.length, 129)
    for one, answer in zip(batch.inputs, batch.targets, strict=True):
        steps = int((~np.isnan(one[:, 0])).sum())
        np.testing.assert_array_equal(one[1:steps], answer[: steps - 1])
        assert np.isnan(answer[steps:]).all()
    path = folder / "TRAIN" / "DR1" / "FCJF0" / "SI0.WAV"
    for content, message in (
        (b"RIFF", "it is no NIST SPHERE file"),
        (published.sphere(t, channel_count="-i 2"), "its header says 2, 2, 16000, expected one channel of 2 bytes"),
        (published.sphere(t, sample_coding="-s26 pcm,embedded-shorten-v2.00"), "not packed"),
        (published.sphere(t)[:-2], "it has 3199 samples, expected 3200 of its header"),
        (published.sphere(t[:100]), "it has 100 samples, expected two frames, 512"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            source("timit").check()


# Pictures.


def test_lists_of_pictures_are_text_or_arrays_and_split_as_published(root):
    """In the numeric order of the lists, 2 before 10, by torch's permutation of seed 42."""
    folder = published.written(root, "pathfinder32")
    found = source("lra_pathfinder")
    order = torch.randperm(20, generator=torch.Generator().manual_seed(42)).numpy()
    answers = np.array([(i + 1) % 2 for i in range(12)] + [(i + 5) % 2 for i in range(8)])
    first = np.array([*range(12), *range(8)])  # the grey of a picture
    for part, cut in zip(found.parts, (order[:16], order[16:18], order[18:]), strict=True):
        np.testing.assert_array_equal(part.answers, answers[cut])
        pixels = np.where(published.random(32, 32).reshape(1, -1) > 250, 255, first[cut][:, None]) / 255
        np.testing.assert_allclose(found.form(list(part.rows))[..., 0], pixels, rtol=1e-6)
    lists = folder / "curv_contour_length_14" / "metadata"
    for name, content, message in (
        ("2.npy", b"imgs/2 sample_0.png 0 2 1.8\n", "one with a label that is not 0 or 1"),
        ("2.npy", b"imgs/2 sample_0.png\n", r"2.npy is damaged: it is no list of pictures: not enough values"),
        ("2.npy", b"\x93NUMPY\x01", r"2.npy is damaged: it is no list of pictures"),
        ("x.npy", b"", "x.npy is damaged: its name is no number"),
    ):
        (lists / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            source("lra_pathfinder").check()
    (lists / "x.npy").unlink()
    published.pathfinder(root / "other", 16)
    with pytest.raises(DataError, match="it has 16 x 16 pixels, expected 32 x 32"):
        source("lra_pathfinder", folder=str(root / "other")).check()
    assert source("lra_pathfinder", folder=str(root / "other"), side=16).batch(0, 3).inputs.shape == (3, 256, 1)
    with pytest.raises(ConfigError, match="side is 0, expected at least 1"):
        source("lra_pathfinder", side=0)
    next((root / "other").rglob("sample_3.png")).write_bytes(b"\x89PNG damaged")
    with pytest.raises(DataError, match=r"sample_3.png is damaged: Pillow cannot read it"):
        source("lra_pathfinder", folder=str(root / "other"), side=16).batch(0, 16)


def test_patches_of_the_middle_of_a_photograph(root):
    """What is drawn in the middle quarter of a wide picture is in the middle patches of the square."""
    from PIL import Image

    folder = published.written(root, "imagenet")
    found = source("imagenet")
    assert (found.length, found.question.inputs.count, found.question.classes) == (16, 147, 3)
    assert [len(part.answers) for part in found.parts] == [10, 2, 6]
    assert all(isinstance(part.rows, FromFiles) for part in found.parts)  # setting some aside reads none
    aside = {path.name for path in found.parts.validation.rows.paths}
    assert aside.isdisjoint(path.name for path in found.parts.train.rows.paths)
    row = found.form([found.parts.test.rows[5]])[0]
    expected = (100 / 255 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    np.testing.assert_allclose(row.reshape(16, 49, 3), np.broadcast_to(expected, (16, 49, 3)), atol=0.05)
    white = found.form([np.full((16, 147), 255, np.uint8)])[0, 7, 3:6]
    np.testing.assert_allclose(white, [2.2489083, 2.4285715, 2.64], rtol=1e-6)
    pixels = np.zeros((64, 200, 3), np.uint8)
    pixels[18:46, 86:114] = 255  # of 64 high, so 32 after scaling, of which the middle 28 are read
    Image.fromarray(pixels).save(folder / "val" / "n01440764" / "n01440764_0.JPEG", "JPEG", quality=100)
    patches = found.photograph(folder / "val" / "n01440764" / "n01440764_0.JPEG").mean(1).reshape(4, 4)
    assert patches[1:3, 1:3].min() > 200 > 20 > np.delete(patches, [5, 6, 9, 10]).max()
    for option, message in (({"patch": 5}, "patch is 5, expected a divisor of side, 28"), ({"aside": 0}, "aside is 0")):
        with pytest.raises(ConfigError, match=message):
            source("imagenet", **option)
    with pytest.raises(DataError, match="aside is 12, expected less than the 12 training images"):
        source("imagenet", aside=12).check()
    (folder / "val" / "n01440764" / "n01440764_0.JPEG").write_bytes(b"\xff\xd8 damaged")
    with pytest.raises(DataError, match=r"n01440764_0.JPEG is damaged: Pillow cannot read it"):
        source("imagenet").check()
    for path in (folder / "val" / "n01484850").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"val.n01484850 has no file \*.JPEG; put into"):
        source("imagenet").check()


def test_an_episode_asks_for_the_class_of_the_example_that_looks_alike(root):
    """Each class of the small files has a grey of its own; parts have others."""
    folder = published.written(root, "miniimagenet")
    found = source("miniimagenet", ways=3, eval_examples=4)
    seen = []
    for rows, part in ((found.batch(0, 4), 0), (next(iter(found.unseen(0))), 1), (found.exam().examples[0], 2)):
        grey = (rows.inputs[..., :-3].reshape(len(rows.inputs), 4, -1, 3) * [0.229, 0.224, 0.225]).mean((2, 3)) + 0.449
        seen += [(part, round(value * 255)) for value in grey.reshape(-1)]
        assert not rows.inputs[:, -1, -3:].any()
        nearest = np.abs(grey[:, :3] - grey[:, 3:]).argmin(1)
        labels = rows.inputs[np.arange(len(nearest)), nearest, -3:]
        np.testing.assert_array_equal(labels.sum(1), 1)
        np.testing.assert_array_equal(labels.argmax(1), rows.targets)
        np.testing.assert_array_equal(rows.inputs[:, :3, -3:].sum(1), 1)
    assert all(abs(value - 80 * part - 15) <= 17 for part, value in seen)
    for option in ("ways", "shots"):
        with pytest.raises(ConfigError, match=f"{option} is 0, expected at least"):
            source("miniimagenet", **{option: 0})
    with pytest.raises(DataError, match=r"train.csv is damaged: it has 6 classes of 2 photographs or more, expected 5"):
        source("miniimagenet", shots=2).check()
    (folder / "val.csv").write_text("filename,label\n../a.jpg,b\n")
    with pytest.raises(DataError, match=r"val.csv is damaged: line \['../a.jpg', 'b'\] is not the name"):
        source("miniimagenet").check()
    (folder / "val.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"its header is \['a', 'b'\], expected filename, label"):
        source("miniimagenet").check()


# Videos.


def test_skeletons_are_sampled_in_the_middle_of_equal_parts(root):
    folder = published.written(root, "ntu")
    found = source("ntu")
    assert [len(part.answers) for part in found.parts] == [5, 1, 3]
    assert found.parts.test.answers.tolist() == [15, 16, 17]  # of the people 3, 6 and 7, in the order of the files
    assert [len(part.answers) for part in source("ntu", across="view").parts] == [5, 1, 3]
    measured = {3, 6, 7, 10, 11, 12, *range(20, 25), 26, 29, 30, 32, 33, 36, 37, 39, 40}  # of the 40 people
    assert set(sources.get("ntu").people) == set(range(1, 41)) - measured
    row = found.parts.test.rows[0].reshape(20, 2, 25, 3)
    frames = np.floor((np.arange(20) + 0.5) * 3 / 20).astype(int)
    for step, frame in zip(row, frames, strict=True):
        first = 100 * frame + 6 + np.arange(25)
        np.testing.assert_array_equal(step[0], 0 if frame == 2 else np.stack([first + 0.5, first + 1, first + 2], 1))
        assert step[1].any() == (frame == 1)
    for option, message in (
        ({"across": "age"}, "across is 'age', expected subject or view"),
        ({"frames": 0}, "frames"),
    ):
        with pytest.raises(ConfigError, match=message):
            source("ntu", **option)
    path = folder / "nturgb+d_skeletons" / "S001C001P003R001A016.skeleton"
    for content, message in (
        ("3\n1\n", "it ends before its last frame"),
        ("1\n1\nx\n2\n1 2 3\n1 2 3\n", "it is no skeleton of 25 joints"),
        ("0\n", "it has no frame"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            source("ntu").check()
    path.rename(path.with_name("S001C001P003R001A061.skeleton"))
    with pytest.raises(DataError, match="its name is not SsssCcccPpppRrrrAaaa with an action of 60"):
        source("ntu").check()


def test_actions_go_on_at_the_steps_of_their_spans(root):
    """Five steps of ten seconds, in the middle of two each."""
    folder = published.written(root, "charades")
    found = source("charades")
    batch = found.exam().examples
    rows = next(iter(batch))
    assert rows.inputs.shape == (2, 7, 3)
    assert np.isnan(rows.inputs[0, 4:]).all()
    assert not np.nan_to_num(rows.targets[0]).any()
    assert np.flatnonzero(rows.targets[1, :, 92] == 1).tolist() == [0, 1, 2]
    assert np.flatnonzero(rows.targets[1, :, 156] == 1).tolist() == [2, 3, 4]
    assert np.isnan(rows.targets[1, 5:]).all()
    for content, message in (
        ("id,actions,length\nTE0,c157 1 2,3\n", "row 1 has an action that is not c000 to c156"),
        ("id,actions,length\nTE0,c1 1,3\n", "row 1 has no id, length and actions"),
        ("id,length\nTE0,3\n", "row 1 has no id, length and actions: KeyError"),
        ("id,actions,length\nTE9,,3\n", r"TE9.npy is missing; put into"),
        ("id,actions,length\n", "it has no video"),
    ):
        (folder / "Charades_v1_test.csv").write_text(content)
        with pytest.raises(DataError, match=message):
            source("charades").check()
    published.charades(written_again(folder))
    for array, message in ((np.zeros(3), "float64 .3,., expected numbers"), (np.array([{}]), "it is no array of numb")):
        np.save(folder / "features" / "TE0.npy", array, allow_pickle=True)
        with pytest.raises(DataError, match=message):
            source("charades").check()


def written_again(folder: Path) -> Path:
    shutil.rmtree(folder / "features")
    return folder


def test_seconds_of_a_film_have_the_actions_of_anyone(root):
    folder = published.written(root, "ava")
    found = source("ava")
    rows = next(iter(found.exam().examples))
    assert rows.targets.shape == (2, 7, 80)
    assert np.flatnonzero(rows.targets[0, 0] == 1).tolist() == [79]
    assert np.flatnonzero(rows.targets[0, 2] == 1).tolist() == [0]
    assert np.isnan(rows.targets[0, 1]).all()  # excluded
    assert not rows.targets[0, 3:5].any()
    assert np.isnan(rows.targets[0, 5:]).all()
    for content, message in (
        ("val-_0,0902,0,0,1,1,81,1\n", "action 81, expected from 1 to 80"),
        ("val-_0,0902,0,0,1,1,80\n", "row 1 has 7 columns, expected 8"),
    ):
        (folder / "ava_val_v2.2.csv").write_text(content)
        with pytest.raises(DataError, match=message):
            source("ava").check()


# Pickles, which are never run.


def damaged(content: bytes) -> str:
    """What is said of a pickle."""
    with pytest.raises(DataError) as error:
        plain(content, folders["jsb_chorales"], Path("a.pickle"))
    return str(error.value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_and_arrays_are_read_from_pickles(protocol):
    """Of every protocol: text, numbers, lists, and arrays that are never made by numpy's own functions."""
    columns = np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3))
    wanted = {"a": [1, -2.5, "é", b"\xff\n", True, None, 2**70], "b": ((1,), {"c": ()})}
    found = plain(pickle.dumps([wanted, columns, np.float32(0.5)], protocol), folders["jsb_chorales"], Path("a"))
    assert found[0] == wanted
    np.testing.assert_array_equal(found[1].values, columns)
    assert found[2] == 0.5


class Runs:
    """Whose pickle calls a function."""

    def __reduce__(self):
        return (print, ("it has run",))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_a_pickle_calls_is_refused_and_not_run(protocol, capfd):
    for thing, name in (
        (Runs(), "builtins.print"),
        ([Path("a")], "pathlib"),
        ({"a": {1}}, "set"),
        (np.array([{}], object), "it has an array of 'O8', expected numbers"),
        (eval, "builtins.eval"),
    ):
        content = pickle.dumps(thing, protocol)
        if isinstance(thing, dict) and protocol >= 4:
            assert plain(content, folders["jsb_chorales"], Path("a")) == thing  # sets are plain from then on
            continue
        assert name.replace("builtins", "__builtin__" if protocol < 3 else "builtins") in damaged(content)
    assert "it has run" not in capfd.readouterr().out
    assert "is damaged: it is no pickle of plain data" in damaged(b"cos\nsystem\n(S'true'\ntR.")
    assert "os.system, expected plain data alone" in damaged(b"cos\nsystem\n(S'true'\ntR.")
    for cut in range(40):
        damaged(pickle.dumps([np.arange(3), "abc"], protocol)[:cut])


# Music.


def test_notes_of_a_frame_are_predicted_from_those_before(root):
    folder = published.written(root, "jsb_chorales")
    found = source("jsb_chorales")
    assert found.length == 8
    batch = next(iter(found.unseen(0)))
    assert [(21 + np.flatnonzero(frame)).tolist() for frame in batch.targets[1, :5]] == [
        [61, 64, 67],
        [61, 65, 67],
        [],
        [61, 67],
        [61, 67, 68],
    ]
    assert np.isnan(batch.targets[1, 5:]).all()
    assert np.isnan(batch.inputs[1, 5:]).all()
    np.testing.assert_array_equal(batch.inputs[1, 1:5], batch.targets[1, :4])
    assert not batch.inputs[:, 0].any()
    asked = ~np.isnan(batch.targets)
    outputs, targets = torch.zeros(int(asked.sum())), torch.from_numpy(batch.targets[asked])
    ((total, count),) = answerer(found.question).scores(outputs, targets).values()
    assert total / count == pytest.approx(88 * np.log(2))  # of a frame
    for pieces, message in (
        ([], "it has no parts train, valid and test"),
        (
            {"train": [[(20,)]], "valid": [], "test": []},
            "a piece is no list of frames of notes: note 20, expected from",
        ),
        ({"train": [[]], "valid": [], "test": []}, "it has no frame"),
        ({"train": 3, "valid": [], "test": []}, "is no list of frames of notes"),
    ):
        (folder / "JSB Chorales.pickle").write_bytes(pickle.dumps(pieces))
        with pytest.raises(DataError, match=message):
            source("jsb_chorales").check()


def test_answers_of_yes_and_no_are_learnt_by_their_likelihood():
    question = Flags(FeatureInputs(3), 2)
    model = answerer(question).model(Stack(8, 1, "lru"), {})
    inputs, targets = torch.randn(2, 5, 3), torch.tensor([0.0, 1.0]).repeat(2, 5, 1)
    targets[1, 3:] = torch.nan
    p = model(inputs)[0].sigmoid()
    p = torch.where(targets == 1, p, 1 - p)[~targets.isnan()]
    torch.testing.assert_close(answerer(question).loss(model, Batch(inputs, targets))[0], -p.log().mean())


# Games.


def test_a_step_of_a_game_has_the_return_to_come_the_last_action_and_screens(root):
    folder = published.written(root, "atari")
    found = source("atari")
    assert (found.question.classes, found.question.inputs.count) == (4, 1 + 4 + 2 * 84 * 84)
    assert sum(len(part.rows) for part in found.parts) == 36  # of whole episodes
    rows = np.array([[12, 5, 14, 5], [12, 5, 14, 8], [0, 14, 18, 14]])
    batch = found.form(list(rows))
    rewards, screens = np.arange(20) % 3, (published.random(20, 84, 84) // 64 + 12) / np.float32(255)
    for row, (_, begin, end, start) in zip(batch[:2], rows[:2], strict=True):
        np.testing.assert_array_equal(row[:, 0], [rewards[t:end].sum() for t in range(start, start + 6)])
        np.testing.assert_array_equal(row[1:, 1:5].argmax(1), np.arange(start, start + 5) % 4)
        assert not row[0, 1:5].any()
        for step, t in enumerate(range(start, start + 6)):
            np.testing.assert_allclose(row[step, 5 + 84 * 84 :], screens[t].reshape(-1), rtol=1e-6)
            before = screens[t - 1].reshape(-1) if t > begin else np.zeros(84 * 84)
            np.testing.assert_allclose(row[step, 5 : 5 + 84 * 84], before, rtol=1e-6)
    assert np.isnan(batch[2, 4:]).all()  # an episode of four
    assert found.answers(FixedPart(rows, rows)).tolist() == [
        [1, 2, 3, 0, 1, 2],
        [0, 1, 2, 3, 0, 1],
        [2, 3, 0, 1, -100, -100],
    ]
    np.testing.assert_allclose(source("atari", unit=2.0).form(list(rows))[..., 0], batch[..., 0] / 2)
    # No row passes the end of its episode, and every step of each begins one, moved back.
    for _, begin, end, start in np.concatenate([part.rows for part in found.parts]):
        assert begin <= start
        assert start + 6 <= end or start == begin
    assert sum(len(part.rows) for part in source("atari", transitions=19, visit=1).parts) in range(19, 19 + 9)
    with pytest.raises(DataError, match="Breakout has 1 whole episodes, expected three or more"):
        source("atari", transitions=1, visit=1).check()
    with pytest.raises(DataError, match=r"Pong.1.replay_logs is missing; "):
        source("atari", game="Pong").check()
    for option, message in (
        ({"window": 0}, "window is 0, expected at least 1"),
        ({"unit": 0.0}, "unit is 0.0, expected"),
    ):
        with pytest.raises(ConfigError, match=message):
            source("atari", **option)
    logs = folder / "Breakout" / "1" / "replay_logs"
    for name, array, message in (
        ("reward", np.zeros(3), "actions, rewards and terminals are 20, 3, 20, expected equal numbers"),
        ("observation", np.zeros((9, 84, 84), np.uint8), "it has 9 screens of uint8, expected 18 of uint8"),
        ("action", np.array([{}]), r"its array is object \(1,\), expected numbers"),
        ("action", np.zeros((20, 2), int), r"its array is int64 \(20, 2\), expected numbers"),
    ):
        before = (logs / f"$store$_{name}_ckpt.0.gz").read_bytes()
        with gzip.open(logs / f"$store$_{name}_ckpt.0.gz", "wb") as file:
            np.save(file, array, allow_pickle=True)
        with pytest.raises(DataError, match=message):
            source("atari").check()
        (logs / f"$store$_{name}_ckpt.0.gz").write_bytes(before)


def test_a_bot_reads_its_mission_and_then_acts(root):
    """Two words by their order in the file, then of each cell a thing, a colour and a state."""
    folder = published.written(root, "babyai")
    found = source("babyai")
    words = {"go": 0, "to": 1, "a": 2, "box": 3, "the": 4, "red": 5, "ball": 6}
    assert found.question.inputs.count == 7 + 49 * 21 + 4 + 7
    assert found.length == 10  # five words, five actions
    assert [len(part.answers) for part in found.parts] == [3, 1, 2]
    rows = next(iter(found.exam().examples))
    images = published.random(3, 7, 7, 3) % [11, 6, 4]
    for step, word in enumerate(["go", "to", "the", "red", "ball"]):
        assert np.flatnonzero(rows.inputs[1, step]).tolist() == [words[word]]
    for t in range(3):
        step = rows.inputs[1, 5 + t]
        cells = step[7 : 7 + 49 * 21].reshape(7, 7, 21)
        assert not step[:7].any()
        np.testing.assert_array_equal(cells[..., :11].argmax(-1), images[t, ..., 0])
        np.testing.assert_array_equal(cells[..., 11:17].argmax(-1), images[t, ..., 1])
        np.testing.assert_array_equal(cells[..., 17:].argmax(-1), images[t, ..., 2])
        assert cells.sum() == 3 * 49
        assert step[-11:-7].argmax() == t
        assert step[-7:].tolist() == [float(t > 0 and one == t) for one in range(7)]
    assert rows.targets[1].tolist() == [-100] * 5 + [1, 2, 3] + [-100] * 2
    assert np.isnan(rows.inputs[1, 8:]).all()
    path = folder / "BabyAI-GoToObj-v0_agent_valid.pkl"
    episodes = pickle.loads(path.read_bytes())
    for wrong, message in (
        ({"a": 1}, "it is no list of episodes of a mission"),
        ([("go", b"x", [0], [7])], "it is no list of episodes of a mission"),
        ([("go", b"x", [0, 1], [6])], "it is no list of episodes of a mission"),
        ([("go", b"x", [0], [6])], "blosc cannot unpack its images"),
        ([("go", episodes[0][1], [0], [6])], r"episode 0 are .2, 7, 7, 3., expected .1, 7, 7, 3. of known things"),
        ([("go", blosc.compress(pickle.dumps(Runs())), [0], [6])], "print, expected plain data alone"),
        ([("go", blosc.pack_array(np.full((1, 7, 7, 3), 11, np.uint8)), [0], [6])], "of known things"),
    ):
        path.write_bytes(pickle.dumps(wrong))
        with pytest.raises(DataError, match=message):
            source("babyai").check()
    with pytest.raises(DataError, match=r"BabyAI-BossLevel-v0_agent.pkl is missing"):
        source("babyai", level="BabyAI-BossLevel-v0").check()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "blosc", None)
        with pytest.raises(ConfigError, match=r"packed by blosc: pip install 'scanl\[babyai\]'"):
            source("babyai").check()


# Text.


def test_a_translation_is_asked_for_after_its_sentence(root):
    folder = published.written(root, "wmt14")
    found = source("wmt14")
    batch = next(iter(found.unseen(0)))
    row = "A cat 0 .\nEine Kätzin 0 .\n".encode()
    assert bytes(batch.inputs[0][: len(row) - 1].astype(np.uint8)) == row[:-1]
    assert not batch.inputs[0][len(row) - 1 :].any()
    assert (batch.targets[0][:9] == -100).all()
    assert bytes(batch.targets[0][9 : len(row) - 1].astype(np.uint8)) == row[10:]
    assert (batch.targets[0][len(row) - 1 :] == -100).all()
    assert len(batch.inputs) == 5
    ((total, count),) = answerer(found.question).scores(torch.zeros(7, 256), torch.arange(7)).values()
    assert total / count == pytest.approx(8)
    assert len(source("wmt14", max_length=26).parts.train.rows) == 0  # longer ones are left out
    swapped = source("wmt14", first="de", second="en")
    assert bytes(swapped.parts.train.rows[0]).startswith(b"Eine")
    (folder / "train.de").write_text("one\n")
    with pytest.raises(DataError, match=r"train.de is damaged: it has 1 sentences, and train.en has 5"):
        source("wmt14").check()
    with pytest.raises(ConfigError, match="max_length is 3, expected at least 4"):
        source("wmt14", max_length=3)


def test_talks_are_cleaned_and_split_as_published(root):
    """Every 23rd for validation; tags, and pairs of unlike lengths, are left out."""
    folder = published.written(root, "iwslt14")
    found = source("iwslt14")
    train, validation, test = (["".join(map(chr, row)) for row in part.rows] for part in found.parts)
    spoken = ["das wetter\nthe weather\n", *(f"es regnet & {i}\nit rains & {i}\n" for i in range(48))]
    assert validation == [spoken[22], spoken[45]]
    assert train == [pair for pair in spoken if pair not in validation]
    assert test == [f"es regnet & {i}\nit rains & {i}\n" for i in range(2)] * 5
    (folder / "IWSLT14.TED.tst2011.de-en.en.xml").write_text("<doc>\n")
    with pytest.raises(DataError, match=r"tst2011.de-en.en.xml is damaged: it has no sentence <seg>"):
        source("iwslt14").check()


def test_verses_are_aligned_over_headings(root):
    """A verse that the Spanish has joined to another is left out; each of the rest is beside its own."""
    folder = published.written(root, "verses")
    found = source("verses")
    pairs = sorted(pair for part in found.pairs() for pair in part)
    places = itertools.product(("Genesis", "Ruth", "Matthew"), (1, 2), range(5))
    names = [" ".join(map(str, p)) for p in places if p not in (("Genesis", 1, 1), ("Matthew", 1, 1))]
    assert pairs == sorted((f"And it was {name}.", f"Y fué {name}.") for name in names)
    assert [len(part.rows) for part in found.parts] == [24, 2, 2]
    verses, blocks = (folder / "nt.bzv").read_bytes(), (folder / "nt.bzs").read_bytes()
    for name, content, message in (
        ("nt.bzv", verses[:-1], "nt.bzv is damaged: it has 149 bytes, expected a multiple of 10"),
        ("nt.bzv", verses[:-10], "nt.bzv is damaged: it ends before Matthew 2 does"),
        ("nt.bzv", verses[:-10] + struct.pack("<IIH", 9, 0, 1), "nt.bzv is damaged: entry 14 is at 0 of block 9"),
        ("nt.bzs", blocks[12:], "nt.bzv is damaged: entry"),
        ("nt.bzs", struct.pack("<III", 1, 9, 9), "nt.bzz is damaged: it lacks block 0 of nt.bzs"),
        ("verses-1769.json", b"[1]", "verses-1769.json is damaged: it is no object of verses"),
    ):
        written = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            source("verses").check()
        (folder / name).write_bytes(written)


def text(row: np.ndarray) -> str:
    return bytes(row.astype(np.uint8)).decode()


def test_questions_have_their_options_by_letter(root):
    folder = published.written(root, "mmlu")
    found = source("mmlu", max_length=1000)
    assert [len(part.answers) for part in found.parts] == [8, 4, 6]
    question = "What, in\n{}, is {}?\nA. one\nB. two\nC. three\nD. {}\nAnswer:"
    assert text(found.parts.train.rows[1]) == question.format("abstract_algebra", 1, 1)
    assert found.parts.train.answers.tolist() == [0, 1, 2, 3] * 2
    two = source("mmlu", max_length=1000, shots=2).parts.test.rows[5]
    shown = [question.format("law", i, i) for i in range(3)]
    assert text(two) == f"{shown[0]} A\n\n{shown[1]} B\n\n{shown[2]}"
    assert text(source("mmlu", max_length=9).parts.test.rows[0]) == "0\nAnswer:"
    (folder / "test" / "law_test.csv").write_text("a,b,c,d,e,F\n")
    with pytest.raises(DataError, match="row 1 is not a question, four options and a letter"):
        source("mmlu").check()
    for options in ({"shots": 6}, {"max_length": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(options))} is"):
            source("mmlu", **options)


def test_documents_of_the_pile_are_read_until_there_are_enough(root):
    folder = published.written(root, "pile")
    documents = [f"train/0{shard} é {i}\n".encode() * 4 for shard in range(2) for i in range(3)]
    short = {"sequence_length": 8}
    assert source("pile", **short).texts[0].tobytes() == b"\0".join(documents)
    assert source("pile", only="ArXiv", **short).texts[0].tobytes() == b"\0".join(documents[1::3])
    assert source("pile", max_bytes=70, **short).texts[0].tobytes() == b"\0".join(documents)[:70]
    assert source("pile", **short).test.tobytes() == b"\0".join(f"test é {i}\n".encode() * 4 for i in range(3))
    with pytest.raises(DataError, match=r"00.jsonl.zst is damaged: it has no document of Books"):
        source("pile", only="Books", **short).check()
    for content, message in (
        (zstandard.compress(b'{"meta": 1}\n'), "line 1 is no document: KeyError"),
        (zstandard.compress(b"[1]\n"), "line 1 is no document: TypeError"),
        (b"no zstd", "line 0 is no document: ZstdError"),
    ):
        (folder / "val.jsonl.zst").write_bytes(content)
        with pytest.raises(DataError, match=f"val.jsonl.zst is damaged: {message}"):
            source("pile", **short).check()
    with pytest.raises(ConfigError, match="max_bytes is 0, expected at least 1"):
        source("pile", max_bytes=0, **short)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)
        with pytest.raises(ConfigError, match=r"packed by zstd: pip install 'scanl\[pile\]'"):
            source("pile", **short).check()


@pytest.mark.parametrize(
    ("name", "task", "file", "text"),
    [
        ("aan", "lra_retrieval", "new_aan_pairs.train.tsv", "another paper"),
        ("wmt14", "wmt14", "train.en", "A cat 2 ."),
        ("mmlu", "mmlu", "auxiliary_train/law_auxiliary_train.csv", "two"),
        ("charades", "charades", "Charades_v1_train.csv", "Kitchen"),
    ],
)
def test_a_line_ends_at_a_line_break_alone(root, name, task, file, text):
    """`str.splitlines` has eight more ends of lines."""
    path = published.written(root, name) / file
    options = {} if name == "charades" else {"max_length": 200}
    plain = [bytes(row) for row in source(task, **options).parts.train.rows]
    content = path.read_text("utf-8")
    assert text in content
    odd = "another\u2028paper\x85an\x0cother\x1cpaper"
    path.write_text(content.replace(text, odd), "utf-8")
    rows = [bytes(row) for row in source(task, **options).parts.train.rows]
    assert len(rows) == len(plain)
    if name not in ("charades", "wmt14"):  # a video's script is not read; blanks are made single spaces
        assert any(odd.encode() in row for row in rows)
    path.write_bytes(content.replace("\n", "\r\n").encode())
    assert [bytes(row).replace(b"\r\n", b"\n") for row in source(task, **options).parts.train.rows] == plain
