"""Plans: what each stage waits for and sends in a step."""

import pytest

from rrfp_jax.core import Agreement, Message, MessageKind, StepRules, stage_plan
from rrfp_jax.layout import CONTROL_DEGREE
from rrfp_jax.schedules import Edge, PipelineGraph, Placement, Task, absences, chain, linear, looped
from tests.model_checker.catalogue import PIPELINE_ONLY

FORK_JOIN = PipelineGraph(3, 2, (Edge(0, 2), Edge(1, 2)))


def waits(plan, what):
    """What a task or gate waits for, as text."""
    node = next(n for n in range(plan.num_nodes) if plan.name(n) == what)
    return sorted(str(p) if isinstance(p, Message) else plan.name(p) for p in plan.prerequisites[node])


def sends(plan, what):
    node = next(n for n in range(plan.num_nodes) if plan.name(n) == what)
    return [(str(message), stage) for message, stage in plan.sends[node]]


def test_chain():
    first, last = (stage_plan(chain(2, 2), linear(2), stage, PIPELINE_ONLY) for stage in (0, 1))
    assert list(map(str, first.tasks)) == ["0F0", "0B0", "0F1", "0B1"]
    assert waits(first, "0F1") == []
    assert waits(first, "0B1") == ["0F1", "gradient of microbatch 1 from chunk 1 to chunk 0"]
    assert sends(first, "0F1") == [("activation of microbatch 1 from chunk 0 to chunk 1", 1)]
    assert waits(last, "1B1") == ["1F1"]
    assert sends(last, "1B1") == [("gradient of microbatch 1 from chunk 1 to chunk 0", 0)]
    assert first.tasks_per_microbatch == (2, 2)


def test_chunks_of_one_stage_need_no_messages():
    plan = stage_plan(chain(2, 1), Placement((0, 0)), 0, PIPELINE_ONLY)
    assert waits(plan, "1F0") == ["0F0"]
    assert waits(plan, "0B0") == ["0F0", "1B0"]
    assert not plan.arrivals
    assert not any(plan.sends)


def test_needs_count_what_prerequisites_name():
    for rules in (PIPELINE_ONLY, StepRules(ordered=True)):
        graph = PipelineGraph(4, 3, (*FORK_JOIN.edges, Edge(2, 3)), split=frozenset({1}), shared=((0, 3),))
        for stage in range(2):
            plan = stage_plan(graph, looped(2, 2), stage, rules)
            assert [len(plan.prerequisites[n]) for n in range(plan.num_nodes)] == list(plan.needs)


def test_split_backward_sends_after_the_input_gradient():
    plan = stage_plan(chain(2, 1, split=True), linear(2), 1, PIPELINE_ONLY)
    assert waits(plan, "1W0") == ["1I0"]
    assert sends(plan, "1I0") == [("gradient of microbatch 0 from chunk 1 to chunk 0", 0)]
    assert sends(plan, "1W0") == []
    assert plan.tasks_per_microbatch == (3,)


def test_join_waits_for_all_that_exist():
    decoder = stage_plan(FORK_JOIN, linear(3), 2, PIPELINE_ONLY)
    assert waits(decoder, "2F0") == [f"activation of microbatch 0 from chunk {c} to chunk 2" for c in (0, 1)]
    assert [stage for _, stage in sends(decoder, "2B0")] == [0, 1]
    skipping = FORK_JOIN.skipping(absences({(1, 0)}))
    decoder = stage_plan(skipping, linear(3), 2, PIPELINE_ONLY)
    assert waits(decoder, "2F0") == ["activation of microbatch 0 from chunk 0 to chunk 2"]
    assert [stage for _, stage in sends(decoder, "2B0")] == [0]
    assert stage_plan(skipping, linear(3), 1, PIPELINE_ONLY).tasks_per_microbatch == (0, 2)


def test_frozen_chunks_run_forwards_only():
    graph = PipelineGraph(3, 2, (Edge(0, 2), Edge(1, 2, carries_gradient=False)))
    encoder, decoder = (stage_plan(graph, linear(3), stage, StepRules()) for stage in (1, 2))
    assert list(map(str, encoder.tasks)) == ["1F0", "1F1"]
    assert [stage for _, stage in sends(decoder, "2B0")] == [0]


def test_ordered_accumulation_chains_the_accumulating_tasks():
    rules = StepRules(ordered=True, updates=False, agreement=Agreement.NONE)
    fused = stage_plan(chain(1, 3).skipping(()), linear(1), 0, rules)
    assert waits(fused, "0B2") == ["0B1", "0F2"]
    split = stage_plan(chain(1, 3, split=True), linear(1), 0, rules)
    assert waits(split, "0W1") == ["0I1", "0W0"]
    assert waits(split, "0I1") == ["0F1"]
    skipping = stage_plan(FORK_JOIN.skipping(absences({(0, 0)})), linear(3), 0, rules)
    assert waits(skipping, "0B1") == ["0F1", "gradient of microbatch 1 from chunk 2 to chunk 0"]


def test_reduction_and_update():
    plan = stage_plan(chain(2, 2), Placement((0, 0)), 0, StepRules(agreement=Agreement.NONE))
    assert waits(plan, "0R") == ["0B0", "0B1"]
    assert waits(plan, "1R") == ["1B0", "1B1"]
    assert waits(plan, "1U") == ["1R"]


def test_shared_parameters_travel_both_ways():
    graph = chain(3, 1, shared=((0, 2),))
    plan = stage_plan(graph, linear(3), 0, StepRules(agreement=Agreement.NONE))
    assert waits(plan, "0R") == ["0B0", "shared from chunk 2 to chunk 0"]
    assert waits(plan, "gradients of chunk 0 complete") == ["0B0"]
    assert sends(plan, "gradients of chunk 0 complete") == [("shared from chunk 0 to chunk 2", 2)]
    assert not [m for m in stage_plan(graph, linear(3), 1, StepRules()).arrivals if m.kind is MessageKind.SHARED]


def test_shared_parameters_on_one_stage_need_no_message():
    plan = stage_plan(chain(2, 1, shared=((0, 1),)), Placement((0, 0)), 0, StepRules(agreement=Agreement.NONE))
    assert waits(plan, "0R") == ["0B0", "1B0"]
    assert waits(plan, "1R") == ["0B0", "1B0"]


def test_a_frozen_copy_contributes_nothing():
    graph = PipelineGraph(3, 1, (Edge(0, 2, carries_gradient=False), Edge(1, 2)), shared=((0, 1, 2),))
    plan = stage_plan(graph, linear(3), 1, StepRules(agreement=Agreement.NONE))
    assert waits(plan, "1R") == ["1B0", "shared from chunk 2 to chunk 1"]
    assert [stage for _, stage in sends(plan, "gradients of chunk 1 complete")] == [2]


def test_all_agree_at_the_first_stage():
    rules = StepRules()
    first, other = (stage_plan(chain(3, 1), linear(3), stage, rules) for stage in (0, 1))
    assert waits(first, "report") == [
        "0B0",
        "0F0",
        "0R",
        "report from stage 1 to stage 0",
        "report from stage 2 to stage 0",
    ]
    assert waits(first, "verdict") == ["report"]
    assert sends(first, "report") == []
    assert sends(first, "verdict") == [(f"verdict from stage 0 to stage {s}", s) for s in (1, 2)]
    assert waits(other, "report") == ["1B0", "1F0", "1R"]
    assert sends(other, "report") == [("report from stage 1 to stage 0", 0)]
    assert waits(other, "1U") == ["1R", "verdict"]
    assert waits(other, "verdict") == ["verdict from stage 0 to stage 1"]


def test_reports_and_verdicts_travel_along_a_tree():
    plan = stage_plan(chain(9, 1), linear(9), 1, StepRules(tree_degree=2))
    assert waits(plan, "report") == [
        "1B0",
        "1F0",
        "1R",
        "report from stage 3 to stage 1",
        "report from stage 4 to stage 1",
    ]
    assert sends(plan, "report") == [("report from stage 1 to stage 0", 0)]
    assert waits(plan, "verdict") == ["verdict from stage 0 to stage 1"]
    assert sends(plan, "verdict") == [(f"verdict from stage 1 to stage {s}", s) for s in (3, 4)]


def test_no_stage_hears_or_tells_more_than_the_tree_s_degree_however_many_there_are():
    graph, placement = chain(1000, 1), linear(1000)
    for stage in (0, 1, 249, 250, 999):
        plan = stage_plan(graph, placement, stage, StepRules())
        control = [m for m in plan.arrivals if m.kind in (MessageKind.REPORT, MessageKind.VERDICT)]
        control += [m for sent in plan.sends for m, _ in sent if m.kind in (MessageKind.REPORT, MessageKind.VERDICT)]
        assert len(control) <= 2 * (CONTROL_DEGREE + 1)


def test_of_the_loss_stages_without_one_report_as_the_step_begins():
    rules = StepRules(agreement=Agreement.LOSS)
    last = stage_plan(chain(3, 2), linear(3), 2, rules)
    assert waits(last, "report") == ["2F0", "2F1"]
    assert waits(last, "verdict") == ["verdict from stage 0 to stage 2"]
    middle = stage_plan(chain(3, 2), linear(3), 1, rules)
    assert waits(middle, "report") == []
    assert waits(middle, "1U") == ["1R", "verdict"]
    first = stage_plan(chain(3, 2), linear(3), 0, rules)
    assert waits(first, "report") == ["report from stage 1 to stage 0", "report from stage 2 to stage 0"]


def test_no_agreement_no_gates():
    assert stage_plan(chain(2, 1), linear(2), 0, StepRules(agreement=Agreement.NONE)).gate_names == ()


def test_graph_and_placement_must_agree():
    with pytest.raises(ValueError, match="the graph has 3 chunks and the placement 2: they must agree"):
        stage_plan(chain(3, 1), linear(2), 0, StepRules())


def test_every_message_has_one_sender_and_one_receiver():
    graph = PipelineGraph(4, 2, (Edge(0, 2), Edge(1, 2), Edge(2, 3)), shared=((0, 1, 3),), split=frozenset({2}))
    for agreement in Agreement:
        plans = [stage_plan(graph, linear(4), stage, StepRules(agreement=agreement)) for stage in range(4)]
        sent = sorted((stage, m) for plan in plans for promises in plan.sends for m, stage in promises)
        received = sorted((plan.stage, message) for plan in plans for message in plan.arrivals)
        assert sent == received
        assert len(set(sent)) == len(sent)


def test_index_finds_the_node_of_a_task():
    plan = stage_plan(chain(2, 2), linear(2), 1, StepRules())
    assert [plan.index[task] for task in plan.tasks] == list(range(len(plan.tasks)))
    assert plan.name(plan.index[Task.parse("1U")]) == "1U"
