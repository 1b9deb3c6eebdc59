"""The order of tokens, the corpus, options, schedule, windows and curve: what needs no run."""

import itertools
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import adjoint
from adjoint.cli import app
from adjoint.models.byte_text import ByteText, is_byte_tokenizer, write_byte_tokenizer
from adjoint.train.evaluate import windows
from adjoint.train.options import TYPES, Options, read_toml
from adjoint.train.presets import PRESETS
from adjoint.train.report.curve import in_terminal, write_png
from adjoint.train.text.corpus import read_corpus
from adjoint.train.text.stream import Stream
from tests.train.small import write_text

DOCUMENTS = [torch.arange(begin, begin + size) for begin, size in ((0, 7), (100, 1), (200, 23), (300, 10))]
TOKENS = 41


def stream(length: int = 5, seed: int = 3, packing: bool = True) -> Stream:
    return Stream(DOCUMENTS, length, seed=seed, packing=packing)


@pytest.mark.parametrize("packing", (True, False))
def test_every_token_comes_equally_often(packing: bool) -> None:
    """Blocks of 8 rows of 5 tokens: 41 of them are 40 epochs of 41 tokens."""
    batch = stream(packing=packing).batch(range(8 * TOKENS))
    assert sorted(batch.tokens.flatten().tolist()) == sorted(40 * torch.cat(DOCUMENTS).tolist())
    if packing:
        counted = sorted(label for label in batch.labels[0].tolist() if label >= 0)
        expected = 40 * [token for document in DOCUMENTS for token in document[1:].tolist()]
        assert counted == sorted(expected), "and is a label as often, but for a document's first"


def test_an_epoch_has_every_token_once_and_an_order_of_its_own() -> None:
    orders = []
    for epoch in range(3):
        pieces = stream().pieces(epoch * TOKENS, TOKENS)
        assert sorted(pieces) == [(index, 0, document.numel()) for index, document in enumerate(DOCUMENTS)]
        orders.append([index for index, _, _ in pieces])
    assert len({tuple(order) for order in orders}) > 1


def test_rows_of_a_long_document_are_shared_out_over_steps() -> None:
    long = Stream([torch.full((5000,), 1), torch.full((5000,), 2)], 10, seed=0)
    steps = [long.batch(range(step * 20, step * 20 + 20)).tokens.float().mean().item() for step in range(50)]
    assert all(1.05 < mean < 1.95 for mean in steps)


def test_a_row_does_not_depend_on_what_was_read_before() -> None:
    """So a resume neither repeats nor skips a token, and ranks may share out a step in any way."""
    fresh = [stream().batch([row]) for row in range(20)]
    data = stream()
    for row in (13, 2, 19, 2, 0):
        assert torch.equal(data.batch([row]).tokens, fresh[row].tokens)
    whole = stream().batch(range(20))
    assert torch.equal(whole.tokens, torch.cat([batch.tokens for batch in fresh], 1))
    assert torch.equal(whole.labels, torch.cat([batch.labels for batch in fresh], 1))
    assert whole.count == sum(batch.count for batch in fresh)
    assert not torch.equal(whole.tokens, stream(seed=4).batch(range(20)).tokens)


def test_sequences_are_pieces_of_documents() -> None:
    batch = stream().batch(range(9))
    assert batch.cu_seqlens is not None
    bounds = batch.cu_seqlens.tolist()
    assert bounds[0] == 0 and bounds[-1] == 45
    for begin, end in itertools.pairwise(bounds):
        piece, labels = batch.tokens[0, begin:end], batch.labels[0, begin:end]
        assert (piece.diff() == 1).all()
        assert torch.equal(labels[:-1], piece[1:]) and labels[-1] in (piece[-1] + 1, -100)
    joined = stream(packing=False).batch(range(9))
    assert joined.cu_seqlens is None and joined.tokens.shape == (9, 5) and joined.count == 45
    assert torch.equal(joined.tokens.flatten(), batch.tokens.flatten())
    assert torch.equal(joined.labels[:, :-1], joined.tokens[:, 1:])


def test_packed_rows_of_one_sequence_each_are_rows() -> None:
    data = Stream([torch.arange(40), torch.arange(100, 103)], 8, seed=3)
    batches = {place: data.batch([place]) for place in range(10)}
    whole = [place for place, batch in batches.items() if batch.cu_seqlens is None]
    assert 2 <= len(whole) < 10
    joined = data.batch(whole)
    assert joined.cu_seqlens is None and joined.tokens.shape == (len(whole), 8)
    assert torch.equal(joined.tokens, torch.cat([batches[place].tokens for place in whole]))
    assert torch.equal(joined.labels, torch.cat([batches[place].labels for place in whole]))
    mixed = data.batch(range(10))
    assert mixed.cu_seqlens is not None and mixed.tokens.shape == (1, 80)


def test_too_little_data_is_an_error() -> None:
    with pytest.raises(adjoint.ArgumentError, match="fewer than two tokens"):
        Stream([torch.zeros(1)], 4, seed=0)
    with pytest.raises(adjoint.ArgumentError, match="no file of the data has two tokens"):
        Stream([torch.zeros(1)] * 5, 4, seed=0)
    assert Stream([torch.zeros(1)] * 5, 4, seed=0, packing=False).batch([0]).count == 4, "one follows the other there"


# ------------------------------------------------------------------------------------------------- corpus


def test_whole_files_are_held_out_and_the_hash_is_of_all(tmp_path: Path) -> None:
    folder = write_text(tmp_path / "text")
    corpus = read_corpus([str(folder)], [], 400)
    names = {document.name for document in (*corpus.training, *corpus.heldout)}
    assert len(names) == 12 == len(corpus.training) + len(corpus.heldout) and corpus.heldout
    for document in corpus.heldout:
        assert document.content == (folder / document.name).read_bytes()
    assert read_corpus([str(folder)], [], 400) == corpus
    (folder / "file_3.py").write_text("another", encoding="utf-8")
    assert read_corpus([str(folder)], [], 400).hash != corpus.hash


def test_a_file_that_is_named_twice_is_not_held_out_and_trained_on(tmp_path: Path) -> None:
    once = read_corpus([str(write_text(tmp_path))], [], 400)
    for more in (tmp_path, tmp_path / "file_3.py", tmp_path / ".." / tmp_path.name):
        assert read_corpus([str(tmp_path), str(more)], [], 400).hash == once.hash
    contents = {document.content for document in once.training}
    twice = read_corpus([str(tmp_path), str(tmp_path)], [], 400)
    assert {document.content for document in twice.training} == contents
    assert contents.isdisjoint(document.content for document in twice.heldout)


def test_one_short_file_does_not_stand_for_all_that_is_held_out(tmp_path: Path) -> None:
    for number, size in enumerate((10, 900, 700, 800, 5000, 5000)):
        (tmp_path / f"{number}.txt").write_text("x" * size, encoding="utf-8")
    corpus = read_corpus([str(tmp_path)], [], 1000)
    assert [len(document.content) for document in corpus.heldout] == [10, 700, 800]


def test_the_standard_library_is_there() -> None:
    corpus = read_corpus([], [], 2**15)
    assert sum(len(document.content) for document in corpus.training) > 2**20
    assert not any("test" in document.name.split("/") for document in corpus.training)
    assert 2**14 < sum(len(document.content) for document in corpus.heldout) < 2**16


def test_one_file_is_cut_at_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text("line of text\n" * 100, encoding="utf-8")
    corpus = read_corpus([str(path)], [], 10**6)
    (training,), (heldout,) = corpus.training, corpus.heldout
    assert training.content + heldout.content == path.read_bytes() and training.content.endswith(b"\n")
    assert len(heldout.content) <= 130


def test_a_corpus_says_what_is_held_out(tmp_path: Path) -> None:
    one = tmp_path / "one.txt"
    one.write_text("line of text\n" * 100, encoding="utf-8")
    words = read_corpus([str(one)], [], 10**6).describe()
    assert "1,183 bytes to train on, its last 117 bytes held out;" in words and "whole" not in words
    (tmp_path / "two.txt").write_text("x", encoding="utf-8")
    words = read_corpus([str(tmp_path)], [], 4).describe()
    assert "1,300 bytes to train on, 1 whole file of 1 byte held out;" in words and "left out" not in words


def test_files_of_a_folder_that_are_not_text_are_left_out_by_name(tmp_path: Path) -> None:
    folder = write_text(tmp_path)
    text = read_corpus([str(folder)], [], 400)
    for path in (_latin(folder), _binary(folder), _empty(folder)):
        corpus = read_corpus([str(folder), str(folder)], [], 400)
        assert (corpus.hash, corpus.training, corpus.heldout) == (text.hash, text.training, text.heldout), path
    assert corpus.describe().endswith("\n2 files left out, not UTF-8 text: data.bin, latin.txt")
    for number in range(3):
        (folder / f"picture{number}.png").write_bytes(b"\x89PNG\0\0")
    more = read_corpus([str(folder)], [], 400).describe()
    assert more.endswith("\n5 files left out, not UTF-8 text: data.bin, latin.txt, picture0.png and 2 more")
    assert "left out" not in read_corpus([str(folder)], [".py"], 400).describe()


def _empty(folder: Path) -> Path:
    (folder / "empty.txt").write_bytes(b"")
    return folder / "empty.txt"


def _binary(folder: Path) -> Path:
    (folder / "data.bin").write_bytes(bytes(range(256)))
    return folder / "data.bin"


def _latin(folder: Path) -> Path:
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    return folder / "latin.txt"


def _no_text(folder: Path) -> Path:
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(b"\x89PNG\0\0")
    return folder / "pictures"


@pytest.mark.parametrize(
    ("make", "words"),
    (
        (_empty, "is empty"),
        (_binary, "is not UTF-8 text: it is binary, or in another encoding"),
        (_latin, "is not UTF-8 text: it is binary, or in another encoding"),
        (_no_text, "has no text among its 1 file"),
        (lambda folder: folder / "nowhere", "cannot read .*nowhere: No such file"),
    ),
    ids=("empty", "binary", "latin", "folder", "missing"),
)
def test_bad_data_is_one_sentence(make: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(adjoint.ArgumentError, match=words):
        read_corpus([str(make(tmp_path))], [], 100)  # type: ignore[operator]


def test_a_folder_that_may_not_be_read_is_not_called_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as for a user who is not root
    with pytest.raises(adjoint.ArgumentError, match=r"cannot read the folder .*: Permission denied"):
        read_corpus([str(tmp_path)], [], 100)


# ------------------------------------------------------------------------------------------------ options


def test_every_option_survives_its_file(tmp_path: Path) -> None:
    options = Options(
        preset="small", data=["a b", 'quo"te'], steps=7, learning_rate=0.1 + 0.2, packing=False, prompt="x\n\t\\é"
    )
    path = tmp_path / "options.toml"
    path.write_text(options.to_toml(), encoding="utf-8")
    assert Options(**read_toml(path)) == options
    assert set(read_toml(path)) == set(TYPES), "every option is written"


@pytest.mark.parametrize(
    ("text", "words"),
    (
        ("sequence_lenght = 3", "no option 'sequence_lenght'; did you mean sequence_length\\?"),
        ('preset = "smal"', "no preset 'smal'; did you mean small\\?"),
        ('optimizer = "sgd"', "no optimizer 'sgd'; there are adamw, muon"),
        ("steps = 1.5", "steps must be an integer, got 1.5"),
        ('steps = "5"', "steps must be an integer, got '5'"),
        ("data = 'text'", "data must be a list of texts"),
        ("accumulation = 0", "accumulation must be at least 1, got 0"),
        ("clip = -1.0", "clip must be at least 0"),
        ("learning_rate = inf", "learning_rate must be finite"),
        ("learning_rate = nan", "learning_rate must be at least 0"),
        ("deterministic = 1", "deterministic must be true or false"),
        ("steps = ", "is no TOML file"),
    ),
)
def test_wrong_options_are_one_sentence(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(adjoint.ArgumentError, match=words):
        Options(**read_toml(path))


def test_a_file_is_read_whole_whatever_the_command_line_says(tmp_path: Path) -> None:
    (tmp_path / "options.toml").write_text('steps = "many"', encoding="utf-8")
    done = CliRunner().invoke(app, ["train", "--config", str(tmp_path / "options.toml"), "--steps", "3"])
    assert done.exit_code == 2 and "steps must be an integer, got 'many'" in done.output


def test_a_preset_fills_in_what_is_not_said() -> None:
    options = Options(preset="small", steps=100).complete()
    assert (options.steps, options.warmup_steps, options.checkpoint_every) == (100, 10, 20)
    assert options.sequence_length == PRESETS["small"].training["sequence_length"]
    assert options.complete() == options
    tuning = Options(start="folder").complete()
    assert tuning.learning_rate < 1e-4 and tuning.sequence_length >= 1024, "a trained model is moved with care"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_models(name: str) -> None:
    from adjoint.models import HybridLM

    model = HybridLM(PRESETS[name].config(256), device="meta")
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    expected = {
        "tiny": (0.3, 1), "tiny-moe": (0.5, 2), "small": (15, 40), "medium": (100, 200), "large": (400, 800),
        "1b": (900, 1300),
    }  # fmt: skip
    assert expected[name][0] < millions < expected[name][1]


# ------------------------------------------------------------------------------- tokens, windows, pictures


def test_bytes_are_tokens_for_the_package_tokenizers_too(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    assert is_byte_tokenizer(tmp_path / "tokenizer.json")
    text = "def naïve(x):\n\treturn '→' + x  \r\n" + "".join(map(chr, range(300)))
    assert "".join(ByteText().decode(ByteText().encode(text))) == text
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


@pytest.mark.parametrize("length", (1, 2, 5, 8, 64))
@pytest.mark.parametrize("size", (1, 2, 9, 40))
def test_windows_predict_every_token_once_from_half_a_window(size: int, length: int) -> None:
    document = torch.arange(size)
    predicted = []
    for window in windows(document, length):
        assert window.tokens.numel() == window.labels.numel() <= length
        for place, label in enumerate(window.labels.tolist()):
            if label >= 0:
                assert window.tokens[place] == label - 1
                assert place + 1 >= min(label, length // 2), "half a window comes before it, or all there is"
                predicted.append(label)
    assert predicted == list(range(1, size))


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    points = [(step, 5.0 / step) for step in range(1, 300)]
    write_png(tmp_path / "loss.png", points)
    content = (tmp_path / "loss.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n") and len(content) > 1000
    lines = in_terminal(points).splitlines()
    assert len(lines) == 9 and lines[0].strip().startswith(f"{max(sum(p[1] for p in points[:4]) / 4, 0):.2f}"[:2])
    for few in ([], [(1, 2.0)], [(1, 2.0), (2, 2.0)]):
        write_png(tmp_path / "few.png", few)
        in_terminal(few)
    image = pytest.importorskip("PIL.Image")
    with image.open(tmp_path / "loss.png") as picture:
        assert picture.size == (900, 480) and len(set(picture.tobytes())) >= 4
