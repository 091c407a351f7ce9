"""The command line as a user meets it: exit codes, one sentence, no traceback."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from torchdefine import __version__, sealed_tensors, train
from torchdefine.cli import command_line, main
from torchdefine.run.result import best_before_the_end
from torchdefine.training.progress import Reporter


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


@pytest.fixture
def torchdefine(capfd: pytest.CaptureFixture) -> Command:
    """The command, run inside this process."""

    def command(*arguments: str | Path) -> Done:
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            main([str(argument) for argument in arguments])
        return Done(int(left.value.code or 0), *capfd.readouterr())

    return command


@pytest.fixture(scope="module")
def finished(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "run"
    train(recipe_file, out=out)
    return out


def test_train_eval_generate_compare(torchdefine: Command, recipe_file: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "second"
    done = torchdefine("train", recipe_file, "--out", out, "--optim.lr", "1e-2", "--train.seed=7", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["overrides"] == {"optim": {"lr": 0.01}, "train": {"seed": 7}}  # as they were read
    assert result["settings"]["optim"]["lr"] == 0.01
    assert "validation perplexity" in done.stderr

    done = torchdefine("eval", out, "--json")
    evaluation = json.loads(done.stdout)
    assert evaluation["perplexity"] == pytest.approx(result["test_perplexity"], rel=1e-6)
    assert "every token predicted once" in evaluation["protocol"]
    evaluated = torchdefine("eval", out, "--split", "valid").stdout
    assert "outside the vocabulary" in evaluated
    assert "too low" not in evaluated
    (strange := tmp_path / "strange.txt").write_text("w1 of quite another tongue\n" * 20)
    assert "With so many unknown words the perplexity is too low" in torchdefine("eval", out, "--data", strange).stdout

    one = torchdefine("generate", out, "--prompt", "w1 w2", "--length", "8", "--seed", "1").stdout
    assert one.startswith("w1 w2 ")
    assert one == torchdefine("generate", out, "--prompt", "w1 w2", "--length", "8", "--seed", "1").stdout

    done = torchdefine("compare", finished, out)
    assert done.returncode == 0, done.stderr
    assert "second" in done.stdout
    compared = json.loads(torchdefine("compare", finished, out, "--json").stdout)
    assert [run["run"] for run in compared["runs"]] == ["run", "second"]
    assert compared["warnings"] == ["Settings other than those of embedding and output differ: optim.lr (0.005, 0.01)."]


def test_tensorboard_logs_lie_in_the_run(torchdefine: Command, recipe_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    done = torchdefine("train", recipe_file, "--out", out, "--tensorboard", "--train.steps", "20")
    assert done.returncode == 0, done.stderr
    assert list((out / "tensorboard").glob("events.*"))
    assert_refused(torchdefine("train", recipe_file, "--tensorboard"), "name it with --out")


def test_params_prints_what_was_asked_for(torchdefine: Command) -> None:
    report = json.loads(torchdefine("params", "table1a/r3", "--json").stdout)
    assert report["total"] == pytest.approx(33.02294)
    assert report["published_total"] == 33.02
    assert {"define", "context", "input_output"} <= report.keys()
    assert "reduce" in torchdefine("params", "table1a/r4", "--plan").stdout
    deeper = json.loads(torchdefine("params", "table1a/r3", "--unit.depth", "5", "--json").stdout)
    assert deeper["define"] > report["define"]


def test_params_counts_with_another_text_and_for_a_run(
    torchdefine: Command, finished: Path, corpus: Path, tmp_path: Path
) -> None:
    def counted(*arguments: str | Path) -> dict:
        return json.loads(torchdefine("params", *arguments, "--json").stdout)

    assert counted("table1a/r3", "--data", corpus, "--embedding.cutoffs", "20,40")["vocabulary_size"] == 62
    assert (
        counted("table1a/r3", "--data", corpus, "--data.max_size", "50", "--embedding.cutoffs", "20,40")[
            "vocabulary_size"
        ]
        == 50
    )
    of_run = counted(finished)
    assert of_run["vocabulary_size"] == 62
    assert of_run["counts"] == json.loads((finished / "result.json").read_text())["parameters"]
    assert counted(finished, "--data.max_size", "50")["vocabulary_size"] == 50
    assert counted(finished, "--unit.depth", "4")["define"] != of_run["define"]
    assert counted("europarl/transformer", "--data.bpe_size", "8000")["vocabulary_size"] == 8000
    assert_refused(torchdefine("params", "tatoeba/laptop", "--data", corpus), "leave --data out")


def test_params_shows_published_numbers_beside_the_published_model_alone(
    torchdefine: Command, recipe_file: Path, tmp_path: Path
) -> None:
    def shown(*arguments: str | Path) -> float | None:
        return json.loads(torchdefine("params", *arguments, "--json").stdout)["published_total"]

    (recipe := tmp_path / "published.yaml").write_text(f"{recipe_file.read_text()}published: {{total: 3}}\n")
    train(recipe, out=tmp_path / "same")
    train(recipe, out=tmp_path / "changed", unit={"depth": 4}, train={"steps": 2})
    assert shown(recipe) == shown(tmp_path / "same") == 3
    assert shown(recipe, "--unit.depth", "4") is None
    assert shown(tmp_path / "changed") is None


def test_a_plot_is_drawn_as_it_was_asked_for(torchdefine: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("torchdefine.analysis.report.draw", lambda kind, *_, **how: asked.append((kind, how)) or [])
    assert torchdefine("plot", "maps", "run", "--centred", "--out", "x.svg").returncode == 0
    assert torchdefine("plot", "curves", "run", "--by", "step", "--out", "x.svg").returncode == 0
    assert asked == [("maps", {"by": "tokens", "centred": True}), ("curves", {"by": "step", "centred": False})]


def test_recipes_lists_a_group(torchdefine: Command) -> None:
    names = [row["name"] for row in json.loads(torchdefine("recipes", "demo", "--json").stdout)]
    bands = ["demo/adaptive-define", "demo/adaptive-projection", "demo/adaptive-scaled"]
    assert names == [*bands, "demo/standard", "demo/standard-scaled"]
    listing = torchdefine("recipes", "demo/").stdout
    assert "demo/standard" in listing
    assert "table1a" not in listing
    assert "BLEU" not in listing  # nobody has published numbers of these


def test_resume_needs_no_recipe(
    torchdefine: Command, recipe_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "run"
    assert torchdefine("train", recipe_file, "--out", out, "--train.steps", "8").returncode == 0
    (out / "result.json").unlink()
    with caplog.at_level("INFO"):
        done = torchdefine("train", "--out", out, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert "no checkpoint yet" not in caplog.text
    assert json.loads(done.stdout)["overrides"] == {"train": {"steps": 8}}
    assert_refused(
        torchdefine("train", "--out", out, "--resume", "--optim.lr", "3"), "another optim.lr (0.005, not 3.0)"
    )
    result = (out / "result.json").read_bytes()
    (out / "result.json").unlink()
    shutil.rmtree(out / "last")
    with caplog.at_level("INFO"):
        torchdefine("train", "--out", out, "--resume")
    assert "The run had written no checkpoint yet, so it starts again at its first step." in caplog.messages
    assert json.loads((out / "result.json").read_text())["test_perplexity"] == json.loads(result)["test_perplexity"]


def test_a_run_worse_than_counting_words_says_so_last(torchdefine: Command, recipe_file: Path, tmp_path: Path) -> None:
    done = torchdefine("train", recipe_file, "--out", tmp_path / "short", "--train.steps", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("A model that only counts words does better, with a perplexity of ")
    done = torchdefine("train", recipe_file, "--out", tmp_path / "wild", "--train.steps", "9", "--optim.lr", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("The model is worse than uniform guessing among the 62 tokens")
    plain = ("--embedding", "standard", "--unit", "none", "--output", "full")
    wild = ("--train.steps", "9", "--optim.lr", "1e9", *plain)
    done = torchdefine("train", recipe_file, "--out", tmp_path / "lost", *wild)
    assert_refused(done, "No validation had a finite perplexity", code=1)


def test_a_text_that_was_encoded_beforehand_trains_the_same_model(
    torchdefine: Command, recipe_file: Path, corpus: Path, finished: Path, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    done = torchdefine("encode", recipe_file, "--data", corpus, "--out", tokens)
    assert done.returncode == 0, done.stderr
    assert "The vocabulary has 62 entries" in done.stdout
    assert f"are in {tokens}: pass it as --data" in done.stdout
    done = torchdefine("train", recipe_file, "--data", tokens, "--out", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    own, direct = json.loads(done.stdout), json.loads((finished / "result.json").read_text())
    assert own["data"] == direct["data"]
    assert own["test_perplexity"] == direct["test_perplexity"]
    evaluated = torchdefine("eval", finished, "--data", tokens, "--json")
    assert json.loads(evaluated.stdout)["perplexity"] == pytest.approx(direct["test_perplexity"], rel=1e-6)

    assert_refused(torchdefine("encode", recipe_file, "--data", corpus, "--out", tokens), "is not empty")
    assert_refused(torchdefine("encode", recipe_file, "--data", tokens, "--out", tmp_path / "x"), "encoded already")
    assert_refused(torchdefine("encode", "tatoeba/laptop", "--out", tmp_path / "x"), "BLEU needs the sentences")
    cut = ("--data.max_size", "20")
    assert_refused(torchdefine("train", recipe_file, "--data", tokens, *cut, "--out", tmp_path / "x"), "data.max_size")
    assert not (tmp_path / "x").exists()


def test_eval_of_a_single_file(torchdefine: Command, finished: Path, corpus: Path) -> None:
    done = torchdefine("eval", finished, "--data", corpus / "test.txt")
    assert done.returncode == 0, done.stderr
    unigram = json.loads((finished / "result.json").read_text())["test_unigram_perplexity"]
    assert f"(unigram {unigram:,.1f}, loss " in done.stdout
    shown = json.loads(torchdefine("eval", finished, "--data", corpus / "test.txt", "--json").stdout)
    assert shown["unigram_perplexity"] == pytest.approx(unigram)


def test_recipes_and_help_teach(torchdefine: Command) -> None:
    names = [row["name"] for row in json.loads(torchdefine("recipes", "--json").stdout)]
    assert "table1a/r3" in names
    families = torchdefine("recipes").stdout
    assert len(families.splitlines()) < 20
    shown = dict(re.findall(r"^(\S+) +(\d+) ", families, re.MULTILINE))
    assert shown == {family: str(count) for family, count in Counter(name.split("/")[0] for name in names).items()}
    listing = torchdefine("recipes", "--all").stdout
    assert listing.index("demo/standard ") < listing.index("tatoeba/laptop ") < listing.index("\ntable1a/r3 ")
    line = next(line for line in listing.splitlines() if line.startswith("table1a/r3 "))
    assert line.split()[-4:] == ["33.02", "39.99", "41.17", "–"]
    assert all(listing.count(f"{name} ") >= 1 for name in names)
    page = torchdefine("train", "--help").stdout
    assert "--optim.lr" in page
    assert "Learning rate." in page
    assert page.index("torchdefine train demo/") < page.index("continue the run in --out") < page.index("--data.corpus")
    assert "The default is in [brackets]. `torchdefine recipes NAME` shows the values of a recipe." in page
    assert "\n\noptim:\n  --optim.kind" in page
    assert "Width of every layer but the last" in page
    params = torchdefine("params", "--help").stdout
    assert "`torchdefine train --help`\nexplains them all" in params
    assert len(params.splitlines()) < 30


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("optim.learning_rate", "did you mean --optim.lr?"),
        ("optim.rate", "is unknown: optim has kind, lr, "),
        ("optim.batch_size", "did you mean --train.batch_size or --eval.batch_size?"),
        ("lr", "did you mean --optim.lr?"),
        ("context.hiden_dim", "did you mean --context.hidden_dim?"),
        ("embeding.map_dim", "The setting --embeding.map_dim is unknown: did you mean --embedding.map_dim?"),
        ("embeding", "'--embeding' is not understood: did you mean --embedding?"),
        ("optm.rate", "did you mean the section 'optim'?"),
        ("outt", "'--outt' is not understood: did you mean --out?"),
        ("xyzzy.rate", "its section is one of data, embedding, unit, context, "),
    ],
)
def test_unknown_settings_get_the_names_that_could_be_meant(
    torchdefine: Command, recipe_file: Path, setting: str, words: str
) -> None:
    assert_refused(torchdefine("train", recipe_file, f"--{setting}", "1"), words)


def test_a_setting_that_a_file_misspells_is_named_as_it_stands_there(torchdefine: Command, tmp_path: Path) -> None:
    (mine := tmp_path / "mine.yaml").write_text("base: demo/standard\noptim: {lrr: 3}\n")
    assert_refused(torchdefine("train", mine), "The setting 'optim.lrr' is unknown: did you mean 'optim.lr'?")


def test_a_command_line_without_words_prints_help(torchdefine: Command) -> None:
    done = torchdefine()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == torchdefine("--help").stdout


def test_a_long_listing_is_cut(torchdefine: Command, tmp_path: Path) -> None:
    for number in range(70):
        (tmp_path / f"{number:02}.conf").touch()
    done = torchdefine("train", "demo/standard", "--data", tmp_path)
    assert_refused(done, "(found: 00.conf, 01.conf, 02.conf, 03.conf, 04.conf, 05.conf, 06.conf, 07.conf and 62 more)")


def completed(script: str, *words: str) -> list[str]:
    """What bash would offer for the last word."""
    given = " ".join(map(shlex.quote, words))
    asked = f"COMP_WORDS=({given}); COMP_CWORD={len(words) - 1}; _torchdefine; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return subprocess.run(["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True).stdout.split()


def test_a_shell_completes_commands_options_settings_and_recipes(torchdefine: Command) -> None:
    script = torchdefine("completion", "bash").stdout
    assert completed(script, "torchdefine", "tr") == ["train", "translate"]
    assert completed(script, "torchdefine", "train", "--embedding.map_di") == ["--embedding.map_dim"]
    assert completed(script, "torchdefine", "train", "--unit", "define-no") == ["define-no-mixer", "define-no-reduce"]
    assert completed(script, "torchdefine", "train", "demo/standard") == ["demo/standard", "demo/standard-scaled"]
    assert completed(script, "torchdefine", "eval", "--checkpoint", "") == ["best", "last", "average"]
    assert completed(script, "torchdefine", "compress", "--method", "b") == ["bits"]
    assert completed(script, "torchdefine", "eval", "--data", "") == []  # so that bash offers files
    zsh, fish = (torchdefine("completion", shell).stdout for shell in ("zsh", "fish"))
    assert zsh.partition("\n")[2] == script
    assert "'__fish_seen_subcommand_from train' -l embedding.map_dim -d " in fish
    assert "'__fish_seen_subcommand_from eval' -l checkpoint -x -a 'best last average' -d " in fish


def test_other_packages_are_heard_only_when_something_failed() -> None:
    code = """
import logging, sys, warnings
import torchdefine.cli.recipes

def noisy(options, _):
    warnings.warn("pytree is changing")
    logging.getLogger("torchao").warning("Skipping import of extensions")
    logging.getLogger("torch.utils.flop_counter").warning("triton not found")
    logging.getLogger("torch").warning("something slow")
    logging.getLogger("transformers").error("this failed")
    logging.getLogger("torchdefine.run").info("ours")

torchdefine.cli.recipes._recipes = noisy
torchdefine.cli.main(["recipes"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "this failed\nours\n")


def test_training_that_ctrl_c_stops_ends_with_the_code_of_shells(
    torchdefine: Command, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Impatient(Reporter):
        def trained(self, record: dict) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("torchdefine.training.progress.default_reporter", Impatient)
    assert_refused(torchdefine("train", recipe_file, "--out", tmp_path / "run"), "with resume", code=130)


def test_recipes_shows_one_that_train_takes_back(torchdefine: Command, recipe_file: Path, tmp_path: Path) -> None:
    shown = torchdefine("recipes", recipe_file)
    assert shown.returncode == 0, shown.stderr
    mine = tmp_path / "mine.yaml"
    mine.write_text(shown.stdout)
    for file in (recipe_file, mine):
        done = torchdefine("train", file, "--out", tmp_path / file.stem, "--train.steps", "5", "--json")
        assert done.returncode == 0, done.stderr
    one, other = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("tiny", "mine"))
    assert one["test_perplexity"] == other["test_perplexity"]
    facts = json.loads(torchdefine("recipes", "table1a/r3", "--json").stdout)
    assert facts["published"]["total"] == 33.02
    assert facts["differing"]["unit"]["kind"] == facts["settings"]["unit"]["kind"] == "define"
    assert "depth" not in facts["differing"]["unit"]
    assert "beam" not in facts["settings"]
    assert_refused(torchdefine("recipes", "table1a/r33"), "did you mean 'table1a/r3'")


def test_the_command_starts_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchdefine", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"torchdefine {__version__}\n"


@pytest.mark.parametrize(
    ("given", "found"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")]
)
def test_idle_threads_of_the_command_soon_sleep_unless_the_user_says_otherwise(
    given: dict[str, str], found: str
) -> None:
    code = """
import os
from torchdefine.cli import command_line, main
try:
    main(["--version"])
finally:
    print(os.environ.get("GOMP_SPINCOUNT"))
"""
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", code], env={**kept, **given}, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"torchdefine {__version__}", found]


def test_an_output_that_lacks_a_character_ends_no_command(finished: Path, tmp_path: Path) -> None:
    """A run may be named as one likes, and the JSON of it stays JSON."""
    run = tmp_path / "Lauf–é"
    shutil.copytree(finished, run)
    for encoding, shown in (("latin-1", "Lauf\\u2013é"), ("ascii", "Lauf\\u2013\\xe9")):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        command = [sys.executable, "-m", "torchdefine", "compare", str(run)]
        done = subprocess.run(command, capture_output=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert shown in done.stdout.decode(encoding)
        done = subprocess.run([*command, "--json"], capture_output=True, env=environment)
        assert json.loads(done.stdout)["runs"][0]["run"] == run.name


def test_an_interrupt_while_torch_is_being_imported_is_one_word() -> None:
    code = """
import os, signal, sys

class Impatient:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
sys.meta_path.insert(0, Impatient())
from torchdefine.cli import command_line, main
main(["recipes"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "torchdefine: Interrupted.\n")


def imported_by(*commands: list[str]) -> set[str]:
    """The modules that a process has imported after it has run these commands."""
    code = """
import contextlib, io, json, sys
from torchdefine.cli import command_line, main
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            main(command)
        except SystemExit as done:
            assert not done.code, (command, done.code)
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_help_that_lists_nothing_registered_needs_no_torch(torchdefine: Command) -> None:
    listed = torchdefine("--help").stdout.partition("COMMAND\n")[2]
    commands = re.findall(r"^    (\w+)", listed, re.MULTILINE)
    assert {"train", "eval", "adapt"} <= set(commands)
    helps = [[name, "--help"] for name in commands if name != "train"]
    assert not {"torch", "numpy", "rich"} & imported_by(["--version"], ["--help"], *helps)


def test_parameters_are_counted_without_torchs_compiler() -> None:
    language, translation = ["params", "demo/adaptive-define"], ["params", "tatoeba/laptop-define", "--plan"]
    assert not {"sympy", "torch._dynamo"} & imported_by(language, translation)


def test_commands_import_only_their_own_rooms_and_task(finished: Path, tmp_path: Path) -> None:
    run, picture = str(finished), str(tmp_path / "curves.svg")
    using = imported_by(["eval", run], ["generate", run], ["recipes", "demo/standard"])
    looking = imported_by(["compare", run], ["params", run], ["plot", "curves", run, "--out", picture])
    others = {"transformers", "onnx", "sympy", "torch._dynamo", "torchdefine.tasks.translation", "torchdefine.adapt"}
    assert not (using | looking) & {*others, "torchdefine.demo"}
    assert "torchdefine.tasks.language" in using & looking
    assert not {"matplotlib", "torchdefine.analysis"} & using


def test_names_and_rooms_of_the_package_come_with_their_first_use() -> None:
    code = """
import sys, torchdefine
assert "torch" not in sys.modules
assert set(torchdefine.__all__) <= set(dir(torchdefine))
assert all(callable(getattr(torchdefine, name)) for name in torchdefine.__all__)
assert torchdefine.adapt.fit and torchdefine.errors.UserError
assert not hasattr(torchdefine, "nothing")
assert not hasattr(torchdefine, "nothing.here")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_type_checker_knows_the_names_of_the_package_and_no_others(tmp_path: Path) -> None:
    package = Path(__file__).parent.parent / "src" / "torchdefine" / "__init__.py"
    (user := tmp_path / "user.py").write_text("from torchdefine import DeFINE, train\nfrom torchdefine import trian\n")
    mypy = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=skip", f"--cache-dir={tmp_path}"]
    done = subprocess.run([*mypy, package, user], capture_output=True, text=True)
    assert [line for line in done.stdout.splitlines() if "error:" in line] == [
        f'{user}:2: error: Module "torchdefine" has no attribute "trian"; maybe "train"?  [attr-defined]'
    ]


def folder_with(tmp_path: Path, **texts: bytes) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in texts.items():
        (folder / f"{name}.txt").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({}, "no training file"),
        ({"train": b""}, "train.txt is empty"),
        ({"train": b"\x00\x01\x02\xff" * 50}, "train.txt is"),
        ({"train": b"word"}, "too few for a batch of 4"),
        ({"train": b"\n"}, "train.txt"),
        ({"train": b"a b c d e\n" * 9, "valid": b""}, "valid.txt is empty"),
    ],
)
def test_bad_texts(
    torchdefine: Command, recipe_file: Path, tmp_path: Path, texts: dict[str, bytes], words: str
) -> None:
    out = tmp_path / "run"
    arguments = ["--embedding", "standard", "--unit", "none", "--output", "full"]
    done = torchdefine("train", recipe_file, "--data", folder_with(tmp_path, **texts), "--out", out, *arguments)
    assert_refused(done, words)
    assert not (out / "last").exists()


def test_weights_that_are_not_the_last_are_said_to_be_earlier_ones() -> None:
    curve = [{"step": 250, "perplexity": 261.16}, {"step": 500, "perplexity": 328.0}]
    result = {"valid_perplexity": 261.16, "best_step": 250, "curve": curve}
    said = "The weights are those of step 250, which has the best validation perplexity. At the end it was 328.00."
    assert best_before_the_end(result) == said
    assert best_before_the_end({**result, "best_step": 500}) == ""
    assert best_before_the_end({"best_step": 3, "curve": []}) == ""  # there was no validation text


def test_bad_commands(torchdefine: Command, recipe_file: Path, finished: Path, tmp_path: Path) -> None:
    cases = {
        "The setting --optim.lrr is unknown: did you mean --optim.lr?": ["train", recipe_file, "--optim.lrr", "1"],
        "optim.lr is -1.0, but must be above 0": ["train", recipe_file, "--optim.lr", "-1"],
        "did you mean 'table1a/r3'": ["params", "table1a/r33"],
        "holds a run already": ["train", recipe_file, "--out", finished],
        "holds no run": ["eval", tmp_path],
        "There is neither a folder nor a corpus called nowhere": ["train", recipe_file, "--data", "nowhere"],
        "The split 'trainn' is unknown: use train, valid or test": ["eval", finished, "--split", "trainn"],
        "The command 'trian' is unknown: did you mean 'train'?": ["trian"],
        "The argument '--frobnicate' is not understood": ["eval", finished, "--frobnicate", "1"],
        "The argument '--splt' is not understood: did you mean --split?": ["eval", finished, "--splt", "valid"],
        "train.steps is -5, but must be at least 1": ["train", recipe_file, "--train.steps", "-5"],
        "holds no run: there is no such folder": ["eval", tmp_path / "nowhere"],
        "report.pdf must end in .html": ["report", finished, "--out", tmp_path / "report.pdf"],
        "needs a value": ["train", recipe_file, "--optim.lr"],
        "optim.lr needs a value": ["train", "--optim.lr", "--out", tmp_path / "new", recipe_file],
        "optim.lr is 'fast'": ["train", "--optim.lr", "fast", recipe_file],
        "temperature is -2": ["generate", finished, "--temperature", "-2"],
        "say which": ["train", recipe_file, "--resume"],
        "Name a recipe to train, or go on with a run by resume": ["train", "--out", tmp_path / "x"],
        "'demo' is no recipe, but some begin so: name one of demo/adaptive-define": ["train", "demo"],
        "data.bpe_size is 100, but must be at least 260": ["params", "tatoeba/laptop", "--data.bpe_size", "100"],
        "is a single file, which is read as a test text, not as valid": [
            *("eval", finished, "--split", "valid", "--data", recipe_file)
        ],
        "There is no file or folder nope.txt: an evaluation takes a folder with texts, a text file, or one of": [
            *("eval", finished, "--data", "nope.txt")
        ],
        "There is no file or folder texts/nope: an evaluation takes": ["eval", finished, "--data", "texts/nope"],
        "called wikitext2 (did you mean wikitext-2?)": ["eval", finished, "--data", "wikitext2"],
        "The length of an evaluation is -5": ["eval", finished, "--length", "-5"],
        "The batch_size of an evaluation is 0": ["eval", finished, "--batch-size", "0"],
        "The device 'tpu' is unknown": ["eval", finished, "--device", "tpu"],
        "neither a folder nor a corpus called @x": ["train", recipe_file, "--data.corpus", "@x"],
        "neither a folder nor a corpus called 010": ["train", recipe_file, "--data.corpus", "010"],
        "The corpus is empty text": ["train", recipe_file, "--data", ""],
        "The run's folder is empty text": ["train", recipe_file, "--out", ""],
        "embedding.map_dim is '[1'": ["train", recipe_file, "--embedding.map_dim", "[1"],
        "train.seed is": ["train", recipe_file, "--train.seed", "1e30"],
        "optim.lr is 'inf'": ["train", recipe_file, "--optim.lr", "inf"],
        "temperature is nan": ["generate", finished, "--temperature", "nan"],
        "--top-k means nothing at a temperature of 0": ["generate", finished, "--temperature", "0", "--top-k", "3"],
        "schedule.drops is empty, but this kind needs at least one": ["train", recipe_file, "--schedule.kind", "drops"],
        "The seed is": ["generate", finished, "--seed", str(2**70)],
        "--data one and --data.corpus two are two texts": [
            *("train", recipe_file, "--data", "one", "--data.corpus", "two")
        ],
        "--codebooks means nothing to the method int8": ["compress", finished, "--method", "int8", "--codebooks", "5"],
        "--steps means nothing to the method bits": ["compress", finished, "--method", "bits", "--steps", "10"],
        "give one of them": ["compress", finished, "--method", "codes", "--budget", "1KB", "--codebooks", "5"],
        "--entries means nothing to the method bits": ["compress", finished, "--budget", "3KB", "--entries", "256"],
        "No int4 table fits into 500 bytes": ["compress", finished, "--method", "int4", "--budget", "500B"],
        "counts parameters, not bytes": ["compress", finished, "--budget", "1k parameters"],
        "--by sets the horizontal axis of curves": ["plot", "maps", finished, "--by", "step", "--out", "x.svg"],
        "--centred is for correlation maps": ["plot", "curves", finished, "--centred", "--out", "x.svg"],
        "context.output_dim is -1": ["train", recipe_file, "--context.output_dim", "-1"],
    }
    for words, arguments in cases.items():
        assert_refused(torchdefine(*arguments), words)


@pytest.mark.parametrize("option", [("--license", "MIT"), ("--checkpoint", "last"), ("--cached",)])
def test_a_check_of_an_export_takes_nothing_else(torchdefine: Command, tmp_path: Path, option: tuple[str, ...]) -> None:
    assert_refused(torchdefine("export", "--check", tmp_path, *option), "leave all other options out")


def test_a_language_model_is_refused_before_standard_input_is_waited_for(
    torchdefine: Command, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)  # so that reading it fails
    assert_refused(torchdefine("translate", finished), "is a model for language, which has no `translate`")


def test_a_run_and_its_recipe_are_told_apart(torchdefine: Command, recipe_file: Path, finished: Path) -> None:
    is_run = f"{finished} is a run and no recipe: go on with it by `torchdefine train --out {finished} --resume`"
    for arguments in (["train", finished], ["recipes", finished], ["train", "--resume", finished]):
        assert_refused(torchdefine(*arguments), is_run)
    assert torchdefine("recipes", finished / "config.yaml").returncode == 0
    for recipe in ("demo/standard", recipe_file):
        is_recipe = f"{recipe} is a recipe and no run: train it first by `torchdefine train {recipe} --out FOLDER`"
        for command in ("eval", "generate", "compare", "report"):
            assert_refused(torchdefine(command, recipe), is_recipe)
    config = finished / "config.yaml"
    assert_refused(torchdefine("eval", config), f"{config} is the recipe of a run: name the run's folder, {finished}.")


def test_an_unfinished_or_damaged_run(torchdefine: Command, finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    (copy / "result.json").unlink()
    done = torchdefine("compare", finished, copy)
    assert done.returncode == 0
    assert "copy (unfinished)" in done.stdout
    assert "Warning: copy is not finished" in done.stdout
    best = copy / "best" / "checkpoint.safetensors"
    best.write_bytes(best.read_bytes()[:200])
    assert_refused(torchdefine("eval", copy), "damaged or cut short")


def test_a_small_text_of_ones_own(
    torchdefine: Command, recipe_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether nothing is measured is said before training and after, and whether too coarsely, beside the numbers."""
    caplog.set_level("INFO", logger="torchdefine")
    texts = folder_with(tmp_path, train=b"a b c d e f g\n" * 40)
    out = tmp_path / "run"
    settings = ["--embedding", "standard", "--unit", "none", "--output", "full", "--train.steps", "4"]
    done = torchdefine("train", recipe_file, "--data", texts, "--out", out, *settings)
    assert done.returncode == 0, done.stderr
    beforehand = [message for message in caplog.messages if "nothing will be validated or tested" in message]
    assert len(beforehand) == 1
    assert "`torchdefine eval RUN --data FILE`" in beforehand[0]
    assert "Nothing was measured, because there is neither a valid nor a test text" in done.stdout
    assert f"`torchdefine eval {out} --data FILE`" in done.stdout
    assert_refused(torchdefine("eval", out), "has no test text: it has train; name another text by data (--data).")
    (other := tmp_path / "other.txt").write_bytes(b"a b c d\n" * 10)
    assert torchdefine("eval", out, "--data", other).returncode == 0

    caplog.clear()
    (texts / "test.txt").write_bytes(b"a b c d\n" * 10)
    done = torchdefine("train", recipe_file, "--data", texts, "--out", tmp_path / "measured", *settings)
    assert "Nothing was measured" not in done.stdout
    assert "nothing will be" not in caplog.text
    exact = f"`torchdefine eval {tmp_path / 'measured'} --split test --batch-size 1` is exact."
    assert f"2 streams share only 50 tokens, and each starts without context. {exact}" in done.stdout
    done = torchdefine("eval", tmp_path / "measured")
    assert "The perplexity is probably too high: 2 streams share only 50 tokens" in done.stdout
    assert "too high" not in torchdefine("eval", tmp_path / "measured", "--batch-size", "1").stdout


def test_the_start_of_training_says_how_often_the_text_is_read(
    recipe_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = folder_with(tmp_path, train=b"a b c d\n" * 80, valid=b"a b c d\n" * 8)
    plain = {"embedding": "standard", "unit": "none", "output": "full"}
    with caplog.at_level("INFO", logger="torchdefine"):
        train(recipe_file, data=texts, out=tmp_path / "run", train={"steps": 25}, **plain)
        # 400 tokens in 4 streams of 100, of which a step reads 10
        assert "The training text has 400 words and line ends; 25 steps are 2.5 passes over it." in caplog.messages
        shortest = {"steps": 1, "batch_size": 1, "length": 5}
        train(recipe_file, data=texts, out=tmp_path / "short", train=shortest, **plain)
    assert "The training text has 400 words and line ends; 1 steps are 0.01 passes over it." in caplog.messages


def test_the_start_of_training_says_how_large_the_vectors_are_that_are_read(
    recipe_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = folder_with(tmp_path, train=b"a b c d\n" * 80, valid=b"a b c d\n" * 8)
    wide = {"kind": "standard", "map_dim": 512, "scale": 3.0, "init_std": 0.01}
    parts = {"embedding": wide, "unit": {"kind": "projection", "embedding_dim": 16}, "output": {"kind": "full"}}
    with caplog.at_level("INFO", logger="torchdefine"):
        run = train(recipe_file, data=texts, out=tmp_path / "run", train={"steps": 1}, **parts)
    (said,) = (message for message in caplog.messages if message.startswith("Initial root mean square of the vectors"))
    assert said.endswith(" (the unit's input: 0.03).")
    (start,) = run.folder.records("start")
    assert start["initial_rms"][""]["unit"] == pytest.approx(0.03, rel=0.05)
    assert f": {start['initial_rms']['']['model']:.2g} (" in said


def test_words_outside_the_vocabulary_are_named(torchdefine: Command, finished: Path) -> None:
    done = torchdefine("generate", finished, "--prompt", "zebra w1 quagga zebra", "--length", "3")
    assert done.returncode == 0
    assert done.stderr == "These words are not in the vocabulary and are read as <unk>: zebra, quagga.\n"
    assert torchdefine("generate", finished, "--prompt", "w1 <unk>", "--length", "3").stderr == ""


def test_a_folder_of_runs_names_them(torchdefine: Command, finished: Path) -> None:
    done = torchdefine("report", finished.parent)
    assert_refused(done, f"holds no run: name a run that lies in it, such as {finished}")


def assert_refused(done: Done, words: str, code: int = 2) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert words in done.stderr, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("torchdefine: ")


def test_python_without_memory_is_the_machines_fault() -> None:
    error = ImportError("torch could not be imported")
    assert not command_line.what_the_machine_lacks(error)
    error.__cause__ = SystemError("error return without exception set")
    assert command_line.what_the_machine_lacks(error).startswith("memory")


def test_a_full_disk_is_the_machines_fault(
    torchdefine: Command, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second checkpoint does not fit: the first one stays whole, and the run can go on from it."""
    out = tmp_path / "run"
    original, written = sealed_tensors.save_file, []

    def full_after_the_first(*arguments, **options) -> None:
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(original(*arguments, **options))

    monkeypatch.setattr(sealed_tensors, "save_file", full_after_the_first)
    assert_refused(torchdefine("train", recipe_file, "--out", out), "The disk is full", code=1)
    monkeypatch.setattr(sealed_tensors, "save_file", original)
    done = torchdefine("train", recipe_file, "--out", out, "--resume", "--json")
    assert json.loads(done.stdout)["steps"] == 60
    assert not list(out.rglob("*.unfinished"))


def test_a_page_of_help_that_a_full_device_does_not_take_is_a_failure() -> None:
    for arguments in (["--help"], ["train", "--help"], ["--version"], ["recipes"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "torchdefine", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert (done.returncode, done.stderr) == (1, "torchdefine: No space left on device.\n")


def test_numbers_of_any_length_and_nul_characters_are_refused(torchdefine: Command, finished: Path) -> None:
    for name in ("--batch-size", "--length", "--memory", "--clamp"):
        for number in ("1" * 30, "9" * 5000, "1e300", "-" + "9" * 30):
            assert_refused(torchdefine("eval", finished, name, number), f"Argument {name}: ")
    assert_refused(torchdefine("generate", finished, "--seed", "1" * 30), "The seed is 1111")
    for setting in ("--embedding.map_dim", "--context.layers", "--train.steps", "--train.batch_size"):
        refused = torchdefine("train", "demo/standard", setting, "1" * 30)
        assert_refused(refused, f"{setting[2:]} is '111111")
    assert_refused(torchdefine("train", "demo/standard", "--context.layers", "100000000"), "must be at least 1 and at")
    code = "import sys; from torchdefine.cli import main; main(sys.argv[1].split(',') + ['a\\0b'])"
    for words in ("eval", "train,demo/standard,--out"):
        done = subprocess.run([sys.executable, "-c", code, words], capture_output=True, text=True)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "has a NUL character in it" in done.stderr


def test_what_a_terminal_would_obey_is_shown(torchdefine: Command, finished: Path, tmp_path: Path) -> None:
    odd = tmp_path / "\x1b[2J\x07run\u202e"
    shutil.copytree(finished, odd)
    for arguments in (["eval", odd], ["compare", odd], ["eval", tmp_path / "\x1b[31mnone"], ["recipes", "\x9b31m"]):
        done = torchdefine(*arguments)
        assert not set("\x1b\x07\x9b\u202e") & set(done.stdout + done.stderr), arguments
        assert done.stdout + done.stderr


def test_a_lack_of_memory_or_descriptors_is_one_sentence(finished: Path) -> None:
    limits = {"RLIMIT_AS": (300 << 20, 1500 << 20), "RLIMIT_NOFILE": (8, 14, 20)}
    for name, sizes in limits.items():
        for size in sizes:
            code = (
                f"import resource; resource.setrlimit(resource.{name}, ({size}, {size}))\n"
                f"import sys; sys.argv = ['torchdefine', 'eval', {str(finished)!r}]\n"
                "from torchdefine.cli import main; main()"
            )
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
            assert done.returncode in (0, 1), (name, size, done.stderr)
            assert "Traceback" not in done.stderr, (name, size, done.stderr)
