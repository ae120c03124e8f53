"""From a command line and files to values: precedence, provenance, and what errors say."""

from pathlib import Path

import pytest

from megatron_moe.config import ConfigError, build_parser, resolve
from megatron_moe.config.settings import Registries, sections, settings


def problems_of(argv: list[str], registries: Registries) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(argv, registries)
    return caught.value.problems


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_default_then_files_in_order_then_flags(tmp_path: Path, registries: Registries) -> None:
    a = write(tmp_path, "a.yaml", "num_layers: 2\nhidden-size: 64\nmoe:\n  num-experts: 8\nlr: 1e-4\n")
    b = write(tmp_path, "b.yaml", "model:\n  hidden_size: 128\n\ndata:\nseq_length: 32\n")
    resolved = resolve(["--num_layers", "6", "--config", a, "--seq-length=16", "--config", b], registries)
    config, origin = resolved.config, resolved.provenance
    assert (config.model.num_layers, origin["num_layers"]) == (6, "--num-layers")
    assert (config.model.hidden_size, origin["hidden_size"]) == (128, f"{b}:2")
    assert (config.moe.num_experts, origin["num_experts"]) == (8, f"{a}:4")
    assert (config.optim.lr, origin["lr"]) == (1e-4, f"{a}:5")
    assert (config.data.seq_length, origin["seq_length"]) == (16, "--seq-length")
    assert (config.training.seed, origin["seed"]) == (1234, "default")
    assert set(origin) == set(settings())
    assert resolved.actions.config == (a, b)


def test_kinds_of_flags(registries: Registries) -> None:
    line = "--bf16 --no-check-for-nan-in-loss-and-grad --qk-layernorm --swiglu --data-path 0.5 a 0.5 b "
    line += "--min-lr -1e-4 --num-experts 4 --num-experts none --print-topology --world-size 8 "
    line += "--moe-router-load-balancing-type none --moe-aux-loss-coeff .1 1e-3"
    resolved = resolve(line.split(), registries)
    config = resolved.config
    assert config.training.params_dtype == "bfloat16" and resolved.provenance["params_dtype"] == "--bf16"
    assert config.training.check_for_nan_in_loss_and_grad is False and config.model.qk_layernorm is True
    assert config.data.data_path == ("0.5", "a", "0.5", "b")
    assert config.optim.min_lr == -1e-4
    assert config.moe.num_experts is None
    assert config.moe.moe_router_load_balancing_type == ("none",)
    assert config.moe.moe_aux_loss_coeff == (0.1, 1e-3)
    assert resolved.actions.print_topology and resolved.actions.world_size == 8 and not resolved.actions.dump_config


def test_yaml_values(tmp_path: Path, registries: Registries) -> None:
    text = "bf16: true\nsplit: 010\nmoe_layer_freq: 2\nsave: null\nnum_experts: none\nlr: 1\ndata_path: [1, a]\n"
    text += "checkpoint:\n  # load: x\nvalid_data_path: v\ntest_data_path: none\n"
    config = resolve(["--config", write(tmp_path, "a.yaml", text)], registries).config
    assert config.training.params_dtype == "bfloat16"
    assert config.data.split == "010" and config.moe.moe_layer_freq == "2"
    assert config.moe.num_experts is None and config.checkpoint.save is None
    assert config.optim.lr == 1.0 and isinstance(config.optim.lr, float)
    assert config.data.data_path == ("1", "a") and config.data.valid_data_path == ("v",)
    assert config.data.test_data_path == ()


FILE_ERRORS = [
    ("hiden_size: 4", "1: unknown key 'hiden_size'; did you mean hidden_size"),
    ("# x\n\nmodle:\n  a: 1", "3: unknown key 'modle'; did you mean model"),
    ("moe:\n  lr: 1", "2: key 'lr' belongs in section 'optim', not in 'moe'."),
    ("num_layers: four", "1: num_layers: expected an integer, got text 'four'."),
    ("num-layers: '4'", "1: num-layers: expected an integer, got text '4'."),
    ("num_layers: 4.0", "1: num_layers: expected an integer, got the number 4.0."),
    ("num_layers: true", "1: num_layers: expected an integer, got the boolean true."),
    ("num_layers: null", "1: num_layers: expected an integer, got null."),
    ("num_layers: [4]", "1: num_layers: expected an integer, got a list."),
    ("num_layers: {a: 4}", "1: num_layers: expected an integer, got a dict."),
    ("num_experts: abc", "1: num_experts: expected an integer or none, got text 'abc'."),
    ("qk_layernorm: 1", "1: qk_layernorm: expected true or false, got the integer 1."),
    ("lr: .nan", "1: lr: expected a number, got the number nan."),
    ("save: yes", "1: save: expected text or none, got the boolean true; put it in quotes."),
    ("moe_aux_loss_coeff: [1, x]", "1: moe_aux_loss_coeff: expected a list of numbers, got text 'x'."),
    ("lr: 1\noptim:\n  lr: 2", "3: key 'lr' was set before, in line 1 of the same file."),
    ("seq_length: 1\nseq-length: 1", "2: key 'seq-length' was set before, in line 1 of the same file."),
    ("moe:\n  num_experts: 2\nmoe:\n  moe_router_topk: 2", "3: section 'moe' was begun before, in line 1;"),
    ("moe: 3", "1: section 'moe' should hold indented lines of the form 'key: value'."),
    ("activation: swigul", "1: activation: 'swigul' is not one of swiglu, geglu"),
    ("activation: swigul", "did you mean swiglu?"),
    ("moe_router: second_othr", "did you mean second_other?"),
    ("moe_router_load_balancing_type: [aux_los]", "did you mean aux_loss?"),
    (
        "bf16: false",
        "1: key 'bf16' can only be true, which means --params-dtype bfloat16; otherwise set params_dtype.",
    ),
    ("dump_config: true", "1: 'dump_config' is an action, which is given on the command line only."),
    ("a: [1\nb: 2", "2: this is not YAML:"),
    ("lr: !what 3", "1: could not determine a constructor"),
    ("- lr", "1: expected lines of the form 'key: value'."),
]


@pytest.mark.parametrize(("text", "message"), FILE_ERRORS)
def test_file_errors_name_line_key_and_cure(text: str, message: str, tmp_path: Path, registries: Registries) -> None:
    path = write(tmp_path, "a.yaml", text)
    (problem,) = problems_of(["--config", path], registries)
    assert problem.startswith(f"{path}:") and message in problem
    assert problem[-1] in ".?" and problem[-2] not in ".?"


FLAG_ERRORS = [
    ("--micro-batchsize 4", "unknown flag --micro-batchsize; did you mean --micro-batch-size?"),
    ("-lr 4", "unknown flag -lr; did you mean --lr?"),
    ("--no-qk-layernrm", "unknown flag --no-qk-layernrm; did you mean --no-qk-layernorm"),
    ("--num-layer 2", "unknown flag --num-layer; did you mean --num-layers"),
    ("--warmup 2", "did you mean --lr-warmup-iters or --lr-warmup-samples or --lr-warmup-fraction?"),
    ("--xyzzy=2", "unknown flag --xyzzy; --help lists all."),
    ("foo", "unexpected word 'foo': every value follows its flag."),
    ("--lr", "--lr: one value is expected and none was given."),
    ("--lr 1 2", "--lr: one value is expected and 2 were given: 1 2."),
    ("--num-layers 1.5", "--num-layers: expected an integer, got '1.5'."),
    ("--lr inf", "--lr: expected a number, got 'inf'."),
    ("--num-layers none", "--num-layers: expected an integer, got 'none'."),
    ("--rampup-batch-size 1 x", "--rampup-batch-size: expected a list of integers, got 'x'."),
    ("--params-dtype fp32", "--params-dtype: 'fp32' is not one of float32, bfloat16, float64"),
    ("--world-size 0", "argument --world-size: must be at least 1, not 0"),
    ("--config /no/such.yaml", "--config /no/such.yaml cannot be read: no such file or directory."),
]


@pytest.mark.parametrize(("line", "message"), FLAG_ERRORS)
def test_flag_errors(line: str, message: str, registries: Registries) -> None:
    (problem,) = problems_of(line.split(), registries)
    assert message in problem


def test_file_that_is_not_text(tmp_path: Path, registries: Registries) -> None:
    (tmp_path / "a.yaml").write_bytes(b"lr: 1\n# \xff\n")
    (problem,) = problems_of(["--config", str(tmp_path / "a.yaml")], registries)
    assert "byte 8 is not UTF-8 text" in problem


def test_all_problems_at_once(tmp_path: Path, registries: Registries) -> None:
    a = write(tmp_path, "a.yaml", "lr: x\nhiden_size: 2\n")
    b = write(tmp_path, "b.yaml", "seed: []\n")
    found = problems_of(
        ["--config", a, "--config", b, "--config", "no.yaml", "--lrr", "3", "--seed", "--min-lr", "y"],
        registries,
    )
    places = [problem.split(" ")[0] for problem in found]
    assert places == [f"{a}:1:", f"{a}:2:", f"{b}:1:", "--config", "unknown", "--seed:", "--min-lr:"]
    with pytest.raises(ConfigError, match=r"^2 problems in the configuration:\n  - .*\n  - .*"):
        resolve(["--lr", "x", "--seed", "y"], registries)


def test_parser_keeps_nothing_between_calls(registries: Registries) -> None:
    parser = build_parser(registries)
    assert [typed.words for typed in parser.parse_args(["--lr", "1"]).typed] == [("1",)]
    assert [typed.words for typed in parser.parse_args(["--lr", "2"]).typed] == [("2",)]
    assert vars(parser.parse_args([])) == {}


def test_help_has_every_flag_its_text_and_groups(registries: Registries, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        resolve(["--help"], registries, "Trains.")
    assert end.value.code == 0
    shown = capsys.readouterr().out
    words = " ".join(shown.split())
    for setting in settings().values():
        assert f"{setting.flag}" in shown.replace(",", " ").split(), setting.name
        assert " ".join(setting.help.split()) in words
    assert "\nMixture of experts:\n" in shown and "layers i (from 0) with i % N == 0" in words
    assert "One of: float32, bfloat16, float64. [default: float32]" in words
    assert max(map(len, shown.splitlines())) <= 110


def test_names_are_unambiguous(registries: Registries) -> None:
    assert not set(settings()) & set(sections())
    build_parser(registries)  # argparse refuses a flag that two settings claim
