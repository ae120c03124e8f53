"""Which implementation is chosen, what is said, and the adapters against stand-ins that record their calls."""

import importlib
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from megatron_moe.kernels import adam, norm, selection
from megatron_moe.kernels.selection import OPERATIONS, choose
from tests.helpers.building import normal

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    selection._choose.cache_clear()
    yield
    selection._choose.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Make some packages look installed and all other libraries not."""

    def install(*names: str) -> None:
        def find(name: str) -> types.SimpleNamespace | None:
            return types.SimpleNamespace(submodule_search_locations=[]) if name in names else None

        monkeypatch.setattr(selection, "find_spec", find)
        monkeypatch.setitem(selection._PROBLEMS, "apex", lambda device: None if "apex" in names else "not installed")

    return install


def test_automatic(installed):
    installed("triton", "transformer_engine", "apex")
    assert set(choose("auto", CPU, torch.float32).chosen.values()) == {"torch"}
    on_gpu = choose("auto", CUDA, torch.bfloat16)
    assert on_gpu.chosen == {name: (libraries[0]) for name, libraries in OPERATIONS.items()} and not on_gpu.reasons
    selection._choose.cache_clear()
    installed()
    assert choose("auto", CUDA, torch.bfloat16).line() == (
        "kernels: torch for scoring, permutation, swiglu, cross_entropy (triton is not usable); "
        "torch for norm (transformer-engine is not usable; apex is not usable); torch for adam (apex is not usable)"
    )


def test_asked_for(installed):
    installed("triton", "transformer_engine", "apex")
    found = choose("triton", CPU, torch.float64)
    assert [found[name] for name in ("scoring", "swiglu", "norm")] == ["triton", "triton", "torch"]
    assert "triton has none" in found.reasons["norm"]
    found = choose("apex", CUDA, torch.bfloat16)
    assert found["norm"] == found["adam"] == "apex" and found["swiglu"] == "triton"
    assert found.reasons == dict.fromkeys(("scoring", "permutation", "swiglu", "cross_entropy"), "apex has none")
    found = choose("apex", CUDA, torch.float64)
    assert found["adam"] == "torch" and found.reasons["adam"] == "apex has no float64"
    assert set(choose("torch", CUDA, torch.bfloat16).chosen.values()) == {"torch"}
    assert set(choose("triton", torch.device("meta"), torch.bfloat16).chosen.values()) == {"torch"}


def test_refused(installed, monkeypatch):
    installed()
    for name, how in (("triton", r"pip install 'megatron-moe\[triton\]'"), ("transformer-engine", "pip install")):
        with pytest.raises(ValueError, match=how):
            choose(name, CUDA, torch.bfloat16)
    installed("triton", "transformer_engine")
    with pytest.raises(ValueError, match="runs on GPUs only"):
        choose("transformer-engine", CPU, torch.float32)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"no code for the device cpu; .* TRITON_INTERPRET=1"):
        choose("triton", CPU, torch.float32)


def test_which_apex(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "apex", raising=False)

    def told() -> str | None:
        importlib.invalidate_caches()
        return selection.missing("apex", "cuda")

    assert "Apex is not installed; build NVIDIA's from" in (told() or "")
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("raise ImportError('pyramid')")
    assert "a toolkit for the web framework Pyramid" in (told() or "")
    (tmp_path / "apex" / "multi_tensor_apply").mkdir()
    assert "without its CUDA extensions" in (told() or "")
    for extension in ("amp_C", "fused_layer_norm_cuda"):
        (tmp_path / f"{extension}.py").touch()
    assert told() is None
    assert "runs on GPUs only" in (selection.missing("apex", "cpu") or "")


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch):
    """Put modules with some attributes in the place of a library's, and forget our adapters of it afterwards."""

    def put(adapter: str, modules: dict[str, dict[str, object]]) -> types.ModuleType:
        for name, attributes in modules.items():
            module = types.ModuleType(name)
            module.__dict__.update(attributes)
            monkeypatch.setitem(sys.modules, name, module)
        name = f"megatron_moe.kernels.{adapter}"
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(f"megatron_moe.kernels.{adapter}", None, raising=False)
        module = importlib.import_module(name)
        monkeypatch.delitem(sys.modules, name)
        return module

    return put


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norm_of_apex(stand_in, kind):
    x, weight, bias = normal(1, 3, 8), normal(2, 8), normal(3, 8) if kind == "LayerNorm" else None
    adapter = stand_in(
        "norm_apex",
        {
            "apex": {},
            "apex.normalization": {},
            "apex.normalization.fused_layer_norm": {
                "fused_layer_norm_affine": lambda x, weight, bias, shape, eps: norm.normalise(x, weight, bias, eps),
                "fused_rms_norm_affine": lambda x, weight, shape, eps: norm.normalise(x, weight, None, eps),
            },
        },
    )
    assert torch.equal(adapter.normalise(x, weight, bias, 1e-2), norm.normalise(x, weight, bias, 1e-2))


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norm_of_transformer_engine(stand_in, kind):
    x, weight, bias = normal(1, 3, 8), normal(2, 8).requires_grad_(), normal(3, 8) if kind == "LayerNorm" else None
    modules = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}  # with the same interface
    adapter = stand_in("norm_transformer_engine", {"transformer_engine": {}, "transformer_engine.pytorch": modules})
    found = adapter.normalise(x, weight, bias, 1e-2)
    torch.testing.assert_close(found, norm.normalise(x, weight, bias, 1e-2))
    found.sum().backward()
    assert weight.grad is not None, "the gradient is that of our weight"


class FakeFusedAdam(torch.optim.Optimizer):
    """Apex's interface and its way of counting, with torch's arithmetic."""

    def __init__(self, params, lr, betas, eps, adam_w_mode):
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def step(self):
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            for p in (p for p in group["params"] if p.grad is not None):
                state, (beta1, beta2) = self.state[p], group["betas"]
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                square = state["exp_avg_sq"] / (1 - beta2 ** group["step"])
                p.data -= group["lr"] * mean / (square.sqrt() + group["eps"])


def test_adam_of_apex(stand_in):
    adapter = stand_in("adam_apex", {"apex": {}, "apex.optimizers": {"FusedAdam": FakeFusedAdam}})
    both = []
    for module in (adam, adapter):
        tensors = [normal(1, 5), normal(2, 3)]
        groups = [{"params": tensors[:1], "weight_decay": 0.1}, {"params": tensors[1:], "weight_decay": 0.0}]
        optimizer = module.make_adamw(groups, lr=0.1, betas=(0.9, 0.99), eps=1e-8)
        for tensor in tensors:
            moments = {name: torch.zeros_like(tensor) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[tensor] = {"step": torch.zeros(())} | moments
        for count in (0.0, 1.0, 7.0):  # the last as after loading a checkpoint
            for i, tensor in enumerate(tensors):
                tensor.grad = normal(10 + i, len(tensor))
                if count == 7.0:
                    optimizer.state[tensor]["step"].fill_(count)
            if count == 7.0:
                for group in optimizer.param_groups:
                    group.pop("step", None)
            optimizer.step()
            assert [float(optimizer.state[tensor]["step"]) for tensor in tensors] == [count + 1] * 2
        both.append(tensors)
    torch.testing.assert_close(both[1], both[0], rtol=1e-12, atol=1e-14)
