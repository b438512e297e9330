"""No pass inside an edit gives unedited logits without a word: threads, compiled and copied models,
weights that change, code that was replaced, recomputed activations."""

from __future__ import annotations

import copy
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.interventions.bases import basis_of
from tests.tiny import HAS_HOOKED, hf_model, tiny, tokens
from tl_geometry import check_model, decompose, split_scores, view
from tl_geometry.base.errors import GeometryError
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.interventions import LiveEdit, project_stream, remove_term
from tl_geometry.models import from_hf

MODEL_CLASSES = ["bridge", *(["hooked"] if HAS_HOOKED else [])]
HEADS = ["L0H1", "L1H0"]
IDS = tokens(2, 10, seed=9)


def fresh(model_class: str, architecture: str = "gpt2") -> Any:
    """A model that a test may change, with the weights of the shared one."""
    name = f"tiny-{architecture}"
    return from_hf(hf_model(architecture), None, model_class=model_class, name=name)


def edit_of(model: Any, basis: PositionContext) -> LiveEdit:
    return remove_term(model, basis, "pos-cvec", HEADS)


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        return model(ids, return_type="logits").clone()


def same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-4, rtol=0)


# -------------------------------------------------------------------------------------------------
# threads


def outcomes(
    model: Any,
    kinds: dict[str, Tensor],
    threads: int = 4,
    passes: int = 10,
    run_one: Callable[[Any], Tensor] = logits,
) -> Counter:
    """What the passes of several threads gave, by the logits that they equal."""
    found: Counter[str] = Counter()

    def run() -> None:
        for _ in range(passes):
            try:
                out = run_one(model)
                found[next((k for k, v in kinds.items() if same(out, v)), "other")] += 1
            except Exception as error:
                found[type(error).__name__] += 1

    workers = [Thread(target=run) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return found


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("architecture", ["gpt2", "bloom"])
def test_every_pass_of_every_thread_is_edited(model_class: str, architecture: str) -> None:
    model, basis = tiny(model_class, architecture), basis_of(model_class, architecture)
    clean = logits(model)
    with edit_of(model, basis):
        inside = logits(model)
    assert not same(clean, inside)
    with edit_of(model, basis) as edit:
        found = outcomes(model, {"clean": clean, "edited": inside})
    assert found == {"edited": 40}
    assert edit.passes == 40
    assert outcomes(model, {"clean": clean}) == {"clean": 40}  # the twin: other logits are seen


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_a_library_pass_in_another_thread_disturbs_nobody(model_class: str) -> None:
    model, basis = tiny(model_class, "gpt2"), basis_of(model_class)
    alone, found = decompose(model, IDS, progress=False), []
    with edit_of(model, basis):
        inside = logits(model)
    worker = Thread(
        target=lambda: found.extend(decompose(model, IDS, progress=False) for _ in "123")
    )
    worker.start()
    while worker.is_alive():
        assert same(logits(model), logits(model))
    worker.join()
    assert len(found) == 3
    assert all(torch.equal(other.pos, alone.pos) for other in found)

    def probes() -> None:  # facts of another object: probes without anybody's hooks
        for _ in range(3):
            check_model(fresh(model_class))

    with edit_of(model, basis):
        worker = Thread(target=probes)
        worker.start()
        while worker.is_alive():
            assert same(logits(model), inside)
        worker.join()


def test_silenced_hooks_act_in_other_threads() -> None:
    from tl_geometry.models.user_hooks import names_of, without_hooks

    model, calls = fresh("bridge"), list[str]()
    model.blocks[0].hook_in.add_hook(lambda value, hook: calls.append("mine"))
    with without_hooks(model):
        logits(model)
        assert calls == []
        worker = Thread(target=lambda: (logits(model), calls.append(str(len(names_of(model))))))
        worker.start()
        worker.join()
    assert calls == ["mine", "1"]


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_a_list_belongs_to_one_thread(model_class: str) -> None:
    model, basis = tiny(model_class, "gpt2"), basis_of(model_class)
    edit, errors = edit_of(model, basis), list[str]()

    def run() -> None:
        try:
            logits(model)
        except GeometryError as error:
            errors.append(str(error))

    with model.hooks(fwd_hooks=edit.hooks()):
        logits(model)
        worker = Thread(target=run)
        worker.start()
        worker.join()
    assert len(errors) == 1
    assert "passes of one thread" in errors[0]
    assert edit.passes == 1


LISTED: dict[str, Callable[[Any, PositionContext], LiveEdit]] = {
    "remove_term": edit_of,
    "project_stream": lambda model, basis: project_stream(model, basis, 1),
}


@pytest.mark.parametrize("name", list(LISTED))
@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_another_thread_is_refused_when_it_adds_a_list(model_class: str, name: str) -> None:
    """Refused before its pass: the first thread takes the hooks of both away with its own."""
    model, basis = fresh(model_class), basis_of(model_class)
    one, two = (LISTED[name](model, basis) for _ in "12")
    hooks, errors = one.hooks(), list[str]()

    def add(found: Any) -> None:
        try:
            with model.hooks(fwd_hooks=found, reset_hooks_end=False):
                pass
        except GeometryError as error:
            errors.append(str(error))

    with model.hooks(fwd_hooks=hooks):
        inside = logits(model)
        for found in (hooks, two.hooks()):
            worker = Thread(target=add, args=[found])
            worker.start()
            worker.join()
    assert ["passes of one thread" in error for error in errors] == [True, True]
    with torch.no_grad():
        assert same(model.run_with_hooks(IDS, fwd_hooks=hooks), inside)
        assert same(model.run_with_hooks(IDS, fwd_hooks=two.hooks()), inside)
    assert not same(logits(model), inside)


@pytest.mark.parametrize("name", list(LISTED))
def test_no_list_of_several_threads_gives_unedited_logits(name: str) -> None:
    model, basis = fresh("bridge"), basis_of("bridge")
    shared = LISTED[name](model, basis).hooks()

    def run_with(hooks: Any, model: Any = model) -> Tensor:
        with torch.no_grad():
            return model.run_with_hooks(IDS, fwd_hooks=hooks)

    kinds = {"clean": logits(model), "edited": run_with(LISTED[name](model, basis).hooks())}
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        every = outcomes(model, kinds, passes=30, run_one=lambda m: run_with(shared))
        every += outcomes(
            model,
            kinds,
            passes=30,
            run_one=lambda m: run_with(LISTED[name](m, basis).hooks()),
        )
    finally:
        sys.setswitchinterval(usual)
    assert every["edited"] > 0
    assert every["GeometryError"] > 0
    assert every["clean"] == every["other"] == 0


# -------------------------------------------------------------------------------------------------
# passes are counted


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_passes_are_counted(model_class: str) -> None:
    model, basis = tiny(model_class, "gpt2"), basis_of(model_class)
    edit = edit_of(model, basis)
    assert "0 passes edited" in repr(edit)
    with edit as opened:
        logits(model)
        logits(model)
    assert (opened.passes, edit.passes) == (2, 2)
    assert "passes=2" in repr(opened)
    for _ in range(3):
        model.run_with_hooks(IDS, fwd_hooks=edit.hooks())
    assert edit.passes == 5
    assert "5 passes edited" in repr(edit)
    edit.hooks()
    assert edit.passes == 5  # the twin: a list that nobody ran


@pytest.mark.parametrize("name", ["term", "stream"])
def test_a_block_without_an_edited_pass_is_refused(name: str) -> None:
    model, basis = tiny("bridge", "gpt2"), basis_of("bridge")

    def made() -> AbstractContextManager[Any]:
        return edit_of(model, basis) if name == "term" else project_stream(model, basis, 1)

    with pytest.raises(GeometryError, match="a forward pass inside the with block"), made():
        pass
    short = remove_term(model, basis, "pos-cvec", "L1H0") if name == "term" else made()
    with pytest.raises(GeometryError, match="a forward pass inside the with block"), short:
        model(IDS, stop_at_layer=int(name == "term"))  # up to the input of the edited layer
    with pytest.raises(KeyError), made():  # an error that is on its way stays
        raise KeyError
    with made() as edit:
        logits(model)
    assert edit.passes == 1


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
def test_a_wrapper_that_was_compiled_before_is_noticed() -> None:
    model, basis = fresh("hooked"), basis_of("hooked")
    compiled: Any = torch.compile(model, backend="eager")
    clean = logits(compiled)
    try:
        with pytest.raises(GeometryError, match=r"torch\.compile"), edit_of(model, basis):
            assert same(logits(compiled), clean)  # hooks that came later are not called
    finally:
        torch._dynamo.reset()


# -------------------------------------------------------------------------------------------------
# copies


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("name", ["term", "stream"])
def test_a_copy_made_inside_an_edit_is_refused(model_class: str, name: str) -> None:
    model, basis = fresh(model_class), basis_of(model_class)
    made = edit_of(model, basis) if name == "term" else project_stream(model, basis, 1)
    with made:
        logits(model)
        inside = copy.deepcopy(model)
        with pytest.raises(GeometryError, match="copied outside of edits"):
            logits(inside)
    assert same(logits(copy.deepcopy(model)), logits(model))  # the twin


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_a_copy_under_a_list_is_edited(model_class: str) -> None:
    model, basis = fresh(model_class), basis_of(model_class)
    clean = logits(model)
    with model.hooks(fwd_hooks=edit_of(model, basis).hooks()):
        inside = logits(model)
        assert same(logits(copy.deepcopy(model)), inside)
    assert not same(clean, inside)


# -------------------------------------------------------------------------------------------------
# weights and code that change


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_weights_that_change_in_use_are_seen(model_class: str) -> None:
    model, basis = fresh(model_class), basis_of(model_class)
    last = dict(model.named_parameters())
    weight = last[[n for n in last if "mlp" in n][-1]].data  # no edited head reads it
    with (
        pytest.raises(GeometryError, match="weights that it was made for"),
        edit_of(model, basis),
    ):
        logits(model)
        weight.mul_(2)
    weight.div_(2)
    edit = edit_of(model, basis)
    hooks = edit.hooks()
    model.run_with_hooks(IDS, fwd_hooks=hooks)
    weight.mul_(2)
    with pytest.raises(GeometryError, match="weights that it was made for"):
        model.run_with_hooks(IDS, fwd_hooks=hooks)
    model.reset_hooks()


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("where", ["module", "model"])
def test_a_replaced_forward_is_a_flag(model_class: str, where: str) -> None:
    model, basis = fresh(model_class), basis_of(model_class)
    assert view(model).hooked() == ()
    module = model if where == "model" else model.blocks[0].mlp
    module = getattr(module, "original_component", module)  # a bridge gives it to what it holds
    forward = module.forward
    module.forward = lambda *given, **named: forward(*given, **named)
    try:
        flags = split_scores(model, IDS, basis, heads=HEADS).provenance.flags
        assert any("forward" in flag and "under hooks at" in flag for flag in flags), flags
        assert any(flag.startswith("basis fitted without these hooks") for flag in flags)
    finally:
        del module.forward
    assert split_scores(model, IDS, basis, heads=HEADS).provenance.flags == ()


# -------------------------------------------------------------------------------------------------
# recomputed activations, caches, quantised and processed weights


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_recomputed_activations_are_edited(model_class: str) -> None:
    model, basis = fresh(model_class), basis_of(model_class)
    weight = next(p for n, p in model.named_parameters() if "W_E" in n or "wte" in n)

    def gradient(recompute: bool) -> Tensor:
        run = partial(model, return_type="logits")
        found = checkpoint(run, IDS, use_reentrant=False) if recompute else run(IDS)
        assert isinstance(found, Tensor)
        (out,) = torch.autograd.grad(found.square().mean(), weight)
        return out

    clean = gradient(recompute=False)
    with edit_of(model, basis):
        plain, again = gradient(recompute=False), gradient(recompute=True)
    assert torch.allclose(plain, again, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(plain, clean, rtol=1e-2)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_weights_processed_after_the_basis_are_refused(model_class: str) -> None:
    model = fresh(model_class)
    basis = decompose(model, tokens(16, 18, seed=2), progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if model_class == "hooked":
            model.process_weights_()
        else:
            model.enable_compatibility_mode(disable_warnings=True)
    with (
        pytest.raises(GeometryError, match="the model it was computed from"),
        edit_of(model, basis),
    ):
        logits(model)
    with pytest.raises(GeometryError, match="the model it was computed from"):
        split_scores(model, IDS, basis, heads=HEADS)
    again = decompose(model, tokens(16, 18, seed=2), progress=False)
    with edit_of(model, again) as edit:
        logits(model)
    assert edit.passes == 1


def test_dynamically_quantised_weights_are_refused() -> None:
    model = fresh("bridge", "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(
            model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True
        )
    with pytest.raises(GeometryError, match="quantis"):
        check_model(model)
