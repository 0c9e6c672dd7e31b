import pytest

from tests.objectives.support import bound, document
from unmask.errors import UserError
from unmask.objectives import build, objectives, rebuild


def test_a_variant_sets_only_what_was_not_given():
    assert build("mdlm", {"variant": "dream"}).cart_q == 0.8
    assert build("mdlm", {"variant": "dream", "cart_q": 0.1, "shift": False}).model_dump(
        include={"weight", "cart_q", "shift", "denominator"}
    ) == {"weight": "cart", "cart_q": 0.1, "shift": False, "denominator": "masked"}
    assert build("block_diffusion", {"variant": "sdar"}).block_size == 4
    assert build("block_diffusion", {"variant": "sdar", "block_size": 16}).block_size == 16
    assert build("block_diffusion", {"variant": "llada2"}).span == (0.3, 0.8)


@pytest.mark.parametrize("name", ["ar", "mdlm", "block_diffusion", "fast_dllm_v2"])
def test_options_survive_json(name):
    for variant in objectives[name].presets or [None]:
        objective = rebuild(name, {"draws": 2} | ({"variant": variant} if variant else {}))
        assert rebuild(name, objective.model_dump(mode="json")) == objective
        assert "mask_token_id" not in objective.model_dump()
        bounded = objective.model_copy(update={"mask_token_id": 7})
        assert bounded.evaluation().mask_token_id == 7
        assert bounded.evaluation().draws == 2
        assert bounded.evaluation().decoding == objective.decoding
        assert bounded.evaluation().excluded_token == bounded.excluded_token
        assert bounded.evaluation().evaluation() == bounded.evaluation()


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("mdlm", {"variant": "lada"}, "unknown variant 'lada' (did you mean 'llada'?); known: mdlm, llada, llada_sft"),
        ("block_diffusion", {"variant": 3}, "unknown variant 3; known: bd3lm, sdar, llada2, a2d"),
        ("block_diffusion", {"blok_size": 4}, "did you mean 'block_size'"),
        ("block_diffusion", {"clip": [0, 1]}, "clip: [0, 1] is not a window"),
        ("block_diffusion", {"clip": "auot"}, "clip: 'auot' is not a window"),
        ("block_diffusion", {"block_size": 2.5}, "block_size: 2.5 is not a block size"),
        ("mdlm", {"weight": "falt"}, "weight='falt'"),
        ("fast_dllm_v2", {"draws": 0}, "draws=0"),
        ("mdln", {}, "did you mean 'mdlm'"),
    ],
)
def test_a_mistake_is_one_sentence(name, options, sentence):
    with pytest.raises(UserError) as error:
        build(name, options)
    assert sentence in str(error.value)
    assert "mask_token_id" not in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unbound_objective_is_the_programmers_mistake():
    with pytest.raises(ValueError, match="mask_token_id"):
        build("mdlm").rows([document(4)], 0)


@pytest.mark.parametrize("name", ["mdlm", "block_diffusion", "fast_dllm_v2"])
@pytest.mark.parametrize("evaluation", [False, True])
def test_noise_depends_on_the_sample_not_on_its_neighbours(name, evaluation):
    """The same document in other packs, at other places and under other company keeps its rows."""
    documents = [document(n, sample, prompt) for n, sample, prompt in [(9, 5, 2), (6, 1, 0), (11, 8, 3), (1, 4, 0)]]
    objective = bound(name, draws=2, **({} if name == "mdlm" else {"block_size": 4}))
    objective = objective.evaluation() if evaluation else objective
    levels = objective.levels(documents, seed=3)
    backwards = objective.levels(documents[::-1], seed=3)[::-1]
    alone = [objective.rows([one], 3, [level]) for one, level in zip(documents, levels, strict=True)]
    again = [objective.rows([one], 3, [level]) for one, level in zip(documents, backwards, strict=True)]
    packed = objective.rows(documents, 3, levels)
    for number, (first, second) in enumerate(zip(alone, again, strict=True)):
        inside = packed.document == number
        for field in ("token", "position", "label", "weight"):
            assert getattr(first, field).tolist() == getattr(second, field).tolist()
            assert getattr(first, field).tolist() == getattr(packed, field)[inside].tolist()
    assert packed.count == sum(rows.count for rows in alone)
    other = objective.rows(documents, 4)
    assert other.token.tolist() != packed.token.tolist()


@pytest.mark.parametrize("name", ["mdlm", "block_diffusion", "fast_dllm_v2"])
def test_the_first_draws_do_not_depend_on_how_many_there_are(name):
    """Draw 0 of one and of three draws masks the same tokens."""
    one = bound(name).rows([document(16, 2)], 0)
    three = bound(name, draws=3).rows([document(16, 2)], 0)
    noisy = [rows.token[rows.clean :].reshape(-1, 16) for rows in (one, three)]
    views = len(noisy[0])
    # Fast-dLLM v2's complements follow all first views.
    assert noisy[1][0].tolist() == noisy[0][0].tolist()
    assert noisy[1][len(noisy[1]) // views * (views - 1)].tolist() == noisy[0][-1].tolist()


def test_the_mask_token_is_the_models_and_no_option() -> None:
    with pytest.raises(UserError, match="set model.mask_token_id"):
        build("mdlm", {"mask_token_id": 3})


@pytest.mark.parametrize(
    ("name", "options", "needs"),
    [
        ("ar", {"draws": 2}, "draws=2 has no effect here: it needs an objective with noise"),
        ("mdlm", {"cart_q": 0.5}, "cart_q=0.5 has no effect here: it needs weight: cart"),
        ("mdlm", {"variant": "dream", "weight": "flat", "cart_q": 0.1}, "cart_q=0.1 has no effect"),
        ("block_diffusion", {"window": [0.3, 0.8]}, "window=[0.3, 0.8] has no effect here: it needs clip: auto"),
        ("block_diffusion", {"redraw": True}, "redraw=True has no effect"),
        ("block_diffusion", {"variant": "llada2", "weight_offset": 1e-3}, "weight_offset=0.001 has no effect"),
        ("mdlm", {"variant": "dream", "weight_offset": 1e-3}, "weight_offset=0.001 has no effect"),
        ("block_diffusion", {"clip": [0.6, 1], "weight_offset": 1e-3}, "weight_offset=0.001 has no effect"),
        ("block_diffusion", {"block_size": "full", "clean": "causal"}, "clean='causal' has no effect"),
        ("block_diffusion", {"block_size": 8, "block_schedule": [{"size": 4}]}, "block_size=8 has no effect"),
    ],
)
def test_an_option_without_effect_is_refused(name, options, needs):
    with pytest.raises(UserError) as error:
        build(name, options)
    assert needs in str(error.value)
    assert rebuild(name, options)  # a checkpoint records all options, used or not


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ar", {"draws": 1}),
        ("mdlm", {"variant": "dream", "weight": "flat"}),
        ("block_diffusion", {"window": [0.3, 0.8], "clip": "auto"}),
        ("block_diffusion", {"redraw": True, "clip": [0.3, 0.8]}),
        ("block_diffusion", {"variant": "a2d", "weight": "flat"}),
        ("block_diffusion", {"clip": [0.4, 1], "weight_offset": 1e-3}),
        ("block_diffusion", {"block_schedule": [{"until": 0.5, "size": "full"}, {"size": 4}], "clean": "causal"}),
    ],
)
def test_an_option_with_an_effect_is_taken_and_so_is_a_default(name, options):
    assert build(name, options) == rebuild(name, options)
