"""The presets: each loads, fits the machine in its header, and is started by commands that exist."""

import argparse
import io
import json
import os
import re
import shlex
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rrfp_jax.cluster import RunKey
from rrfp_jax.cluster.child_processes import Output
from rrfp_jax.cluster.config import LaunchSettings
from rrfp_jax.commands import launch
from rrfp_jax.commands.training.config import TrainConfig, add_overrides, load_train_config, overrides_of
from rrfp_jax.commands.training.model_parts import cut_language_model, cut_vision_language_model, vision_language_config
from rrfp_jax.commands.training.planned import check_meshes, ordering_of
from rrfp_jax.core.replicas import microbatches_per_replica
from rrfp_jax.costs.devices import device_of
from rrfp_jax.exit_codes import BAD_INPUT, COMPUTED_WRONGLY, DONE, INTERRUPTED, NOT_FINITE, PEER_LOST, PREEMPTED
from rrfp_jax.layout import Layout
from rrfp_jax.models.presets import MODELS
from rrfp_jax.planner import plan
from rrfp_jax.planner.analytic_costs import MicrobatchRows, rows_of_microbatch
from rrfp_jax.planner.configured import configured_memory
from rrfp_jax.programs.model_graph import model_graph
from rrfp_jax.readable import format_bytes, parse_bytes
from rrfp_jax.runtime.cluster import membership_from
from tests.commands.running import ROOT

CONFIGS = ROOT / "tpu_gpu_configs"
PRESETS = sorted(path.relative_to(CONFIGS) for kind in ("cpu", "gpu", "tpu") for path in CONFIGS.glob(f"{kind}/*.yaml"))
MACHINE = re.compile(r"# Machine: (\d+) nodes? x (\d+) devices, (\d+) process(?:es)? on each node\.")
ON_THIS_MACHINE = ("debug", "multimodal", "text")
"""Presets of one process on any machine."""
JOB_SETS = {"jobset.yaml": ("nvidia.com/gpu", 8), "jobset_tpu.yaml": ("google.com/tpu", 4)}


def load(path: str | Path, overrides: dict[str, Any] | None = None) -> TrainConfig:
    return load_train_config(str(ROOT / path if (ROOT / path).exists() else path), overrides or {})


def machine_of(path: Path) -> tuple[int, int, int]:
    """Nodes, devices of each, and processes on each, as the preset's header says."""
    match = MACHINE.search((ROOT / path).read_text())
    assert match, f"{path} does not say what machine it is for"
    nodes, devices, processes = map(int, match.groups())
    return nodes, devices, processes


def layout_of(config: TrainConfig, num_ranks: int) -> Layout:
    pipeline = config.pipeline
    return Layout(num_stages=pipeline.num_stages, data=pipeline.replicas, mesh=pipeline.meshes, num_ranks=num_ranks)


def check_launch(words: list[str], environ: dict[str, str]) -> tuple[LaunchSettings, TrainConfig]:
    """Read a launcher's command line as the launcher and then each of its processes does."""
    settings = launch_settings(words, environ)
    module, *arguments = settings.command
    assert module == "experiments.train" or (module, arguments.pop(0)) == ("rrfp_jax.commands.main", "train")
    if settings.shares_key:
        RunKey.from_environment(environ)
    return settings, check_train(arguments)


def launch_settings(words: list[str], environ: dict[str, str]) -> LaunchSettings:
    output = Output(io.BytesIO(), io.BytesIO(), prefix="always")
    return launch._settings(launch.make_parser().parse_args(words), environ, output)


def check_train(words: list[str]) -> TrainConfig:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    add_overrides(parser)
    arguments = parser.parse_args(words)
    return load(arguments.config, overrides_of(arguments))


def test_there_is_a_preset_for_every_kind_of_machine() -> None:
    assert {path.parts[0] for path in PRESETS} == {"cpu", "gpu", "tpu"}
    sizes = {Path(path).stem: machine_of(CONFIGS / path)[:2] for path in PRESETS if path.stem not in ON_THIS_MACHINE}
    assert sizes["one_node_8"] == (1, 8)
    assert sizes["two_nodes_16"] == (2, 8)
    assert sizes["sixteen_nodes_128_tensor2"] == (16, 8)
    assert set(sizes.values()) >= {(1, 4), (4, 4)}


@pytest.mark.parametrize("preset", PRESETS, ids=str)
def test_a_preset_loads_and_its_model_fits_its_layout(preset: Path) -> None:
    config = load(CONFIGS / preset)
    pipeline = config.pipeline
    model = None if config.vision is None else cut_vision_language_model(config)
    share = microbatches_per_replica(config.data.num_microbatches, pipeline.replicas)
    order = ordering_of(pipeline).resolve(
        num_stages=pipeline.num_stages,
        num_microbatches=share,
        chunks_per_stage=pipeline.chunks_per_stage,
        placement=None if model is None else model.placement,
        graph=None if model is None else replace(model_graph(model.chunks, model.edges, None), num_microbatches=share),
    )
    chunks = cut_language_model(config, order.placement.num_chunks) if model is None else model.chunks
    assert len(chunks) == order.placement.num_chunks
    check_meshes(config)
    if order.footprints is None:
        assert max(order.windows) <= order.graph.num_microbatches, "a wider window than microbatches bounds nothing"
    if preset.parts[0] != "cpu":
        assert config.run.platform is None


@pytest.mark.parametrize("preset", [path for path in PRESETS if path.stem not in ON_THIS_MACHINE], ids=str)
def test_a_preset_uses_all_devices_of_its_machine_evenly(preset: Path) -> None:
    nodes, devices, processes = machine_of(CONFIGS / preset)
    layout = layout_of(load(CONFIGS / preset), nodes * processes)
    assert layout.num_devices == nodes * devices
    assert layout.devices_per_rank * processes == devices


def commands_in(text: str) -> list[list[str]]:
    """The command lines in a file's comments, continued lines joined, places to fill in filled in."""
    joined = re.sub(r"\\\n#\s+", "", text)
    found = re.findall(r"(?:python -m experiments\.\w+|sbatch) .*", joined)
    return [shlex.split(line.replace("--node-rank I", "--node-rank 0").replace("HOST", "localhost")) for line in found]


@pytest.mark.parametrize("preset", [path for path in PRESETS if path.stem not in ON_THIS_MACHINE], ids=str)
def test_the_commands_of_a_header_start_that_preset_on_that_machine(
    preset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, devices, _ = machine_of(CONFIGS / preset)
    commands = commands_in((CONFIGS / preset).read_text())
    assert commands
    for command in commands:
        if command[0] == "sbatch":
            script, config, processes = command[-3:]
            assert (ROOT / script).exists()
            num_ranks = int(command[command.index("--nodes") + 1]) * int(processes)
        elif command[2] == "experiments.train":
            config, num_ranks = command[command.index("--config") + 1], 1
        else:
            settings, loaded = check_launch(command[3:], RunKey.generate().environment())
            assert loaded == load(CONFIGS / preset)
            config, num_ranks = command[command.index("--config") + 1], settings.num_ranks
        assert ROOT / config == CONFIGS / preset
        assert layout_of(load(config), num_ranks).num_devices == nodes * devices


def test_the_multimodal_preset_is_a_pair_of_the_models_that_are_known_by_name() -> None:
    config = load(CONFIGS / "gpu/one_node_8_multimodal.yaml")
    assert vision_language_config(config) == MODELS["qwen3-1.7b+vit-h"]


FORECAST = re.compile(r"\| `(\S+)\.yaml` \| (\S+), [^|]*\| ([^|]*) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|")
"""A row of the README's table of memory: preset, device, its memory, the fullest stage as compiled, the same as a plan
works it out, what is free of the former."""
DENSE, OTHERS = 1.15, 1.25
"""How many times as much as programs need a plan may work out, for dense models and others."""
FOUR_IMAGES = MicrobatchRows(num_rows=4, length=2048, image_rows=4, patch_length=256)
"""A microbatch of the multimodal preset, whose data are not here, with as many rows of text as it may have."""


def forecasts_told() -> list[tuple[str, ...]]:
    return FORECAST.findall((CONFIGS / "README.md").read_text())


def test_every_preset_of_an_accelerator_has_a_forecast() -> None:
    presets = {str(path.relative_to(CONFIGS).with_suffix("")) for path in CONFIGS.glob("[gt]pu/*.yaml")}
    assert {row[0] for row in forecasts_told()} == presets


@pytest.mark.parametrize("row", forecasts_told(), ids=lambda row: row[0])
def test_a_preset_fits_its_device_and_the_forecast_is_what_the_readme_says(row: tuple[str, ...]) -> None:
    name, device, has, compiled, foreseen, free = row
    config, record = load(CONFIGS / f"{name}.yaml"), device_of(device)
    rows = FOUR_IMAGES if config.vision else rows_of_microbatch(config, config.data.microbatch_size)
    peak = max(stage.peak for stage in configured_memory(config, record, rows))
    assert (has, foreseen) == (format_bytes(record.num_bytes), format_bytes(peak))
    needs = parse_bytes(compiled, name)
    assert needs <= 0.95 * record.num_bytes
    assert free == f"{1 - needs / record.num_bytes:.0%}"
    assert 1.0 <= peak / needs <= (OTHERS if config.vision or config.model.experts else DENSE)


def test_a_plan_of_a_large_preset_needs_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    name = "gpu/llama3_70b_128"
    assert plan.main(["--config", name, "--device", "h100", "--as-configured", "--json"]) == DONE
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["ranking"][0]
    (needs,) = (row[4] for row in forecasts_told() if row[0] == name)
    assert format_bytes(told["peak_bytes"]) == needs
    nodes, devices, _ = machine_of(CONFIGS / f"{name}.yaml")
    assert told["devices"] == nodes * devices


# -- SLURM -----------------------------------------------------------------------------------------------------------

RRFP = """#!/bin/bash
printf '%s\\n' "$*" >>rrfp.log
env | grep -E '^(RRFP|SLURM)_|^NPROC=' | sort >"environment.${SLURM_NODEID-batch}"
case $2 in
--new-key) touch "$3" ;;
--supervise)
    if [ -n "${REFUSED-}" ]; then exit 2; fi
    printf '%s\\n' RRFP_NUM_RANKS=16 RRFP_RENDEZVOUS=tcp://10.1.2.3:8476 RRFP_COORDINATOR=10.1.2.3:8477
    exec sleep 60
    ;;
*) exit "${CODE-0}" ;;
esac
"""
SRUN = """#!/bin/bash
printf '%s\n' "$*" >>srun.log
while [[ $1 == --* ]]; do shift; done
code=0
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=$SLURM_NNODES
for node in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$node "$@" || code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
if [ "$1" = requeue ]; then echo "$2" >>requeued; else printf 'nodea\\nnodeb\\n'; fi
"""


def submit(script: str, *arguments: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script as on the first of two nodes, with stand-ins that write down what they are told."""
    programs = {".venv/bin/rrfp": RRFP, "elsewhere/rrfp": RRFP, "bin/srun": SRUN, "bin/scontrol": SCONTROL}
    for name, text in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    given = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "SLURM_JOB_NAME": "rrfp", "SLURM_JOB_ID": "17"}
    given |= {"SLURM_NNODES": "2", "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "node[a-b]", **environ}
    return subprocess.run(
        ["bash", ROOT / "tpu_gpu_configs/slurm" / script, *arguments],
        cwd=folder,
        env=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def rrfp_calls(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "rrfp.log").read_text().splitlines()]


def environment(folder: Path, of: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (folder / f"environment.{of}").read_text().splitlines())


@pytest.mark.parametrize("script", ["launchers.sbatch", "ranks.sbatch"])
def test_batch_scripts_are_bash_and_ask_for_what_they_use(script: str) -> None:
    path = CONFIGS / "slurm" / script
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    text = path.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "signal", "requeue", "output"} <= options.keys()
    assert options["signal"].startswith("TERM@"), "the steps are told, not the script"
    last = max(n for n, line in enumerate(text.splitlines()) if line.startswith("#SBATCH"))
    first = min(n for n, line in enumerate(text.splitlines()) if line and not line.startswith("#"))
    assert last < first, "SLURM stops reading options at the first command"


def test_a_launcher_on_every_node_starts_the_run(tmp_path: Path) -> None:
    config = "tpu_gpu_configs/gpu/two_nodes_16.yaml"
    result = submit("launchers.sbatch", config, "8", "--steps", "5", folder=tmp_path, RRFP_INTERFACE="ib0")
    assert result.returncode == 0, result.stderr
    key, *launches = rrfp_calls(tmp_path)
    assert key == ["launch", "--new-key", "runs/rrfp-17/run.key"]
    assert [words[0] for words in launches] == ["launch"] * 2
    for node, words in enumerate(launches):
        told = environment(tmp_path, str(node))
        key_file = told.pop("RRFP_RUN_KEY_FILE")
        assert key_file == "runs/rrfp-17/run.key"
        settings, loaded = check_launch(words[1:], told | RunKey.generate().environment())
        assert (settings.node_rank, settings.num_ranks, settings.interface) == (node, 16, "ib0")
        assert str(settings.head) == "nodea:8476"
        assert (loaded.run.steps, loaded.run.run_dir) == (5, "runs/rrfp-17")
        assert layout_of(loaded, settings.num_ranks).devices_per_rank == 1
    assert not (tmp_path / "runs/rrfp-17/run.key").exists()
    assert not (tmp_path / "requeued").exists()


def test_ranks_that_slurm_starts_find_the_supervisor(tmp_path: Path) -> None:
    result = submit("ranks.sbatch", "tpu_gpu_configs/gpu/two_nodes_16.yaml", "--window", "4", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    calls = rrfp_calls(tmp_path)
    (supervisor,) = [words for words in calls if "--supervise" in words]
    settings = launch_settings(supervisor[1:], {"RRFP_INTERFACE": "ib0"})
    assert (settings.supervises, settings.interface, str(settings.head)) == (True, "ib0", "nodea:8476")
    trains = [words for words in calls if words[0] == "train"]
    assert len(trains) == 2
    loaded = check_train(trains[0][1:])
    assert loaded.pipeline.window == 4
    assert layout_of(loaded, settings.num_ranks).devices_per_rank == 1
    told = environment(tmp_path, "0")
    assert (told["RRFP_DETECT"], told["NPROC"]) == ("1", "8")
    place = membership_from(told | {"RRFP_RANK": "3"})
    assert place is not None
    assert (place.num_ranks, place.rendezvous, place.coordinator) == (16, "tcp://10.1.2.3:8476", "10.1.2.3:8477")
    assert place.interface is None, "each node listens on what reaches the supervisor"


def test_ranks_are_not_started_where_the_supervisor_is_refused(tmp_path: Path) -> None:
    result = submit("ranks.sbatch", "gpu/two_nodes_16", folder=tmp_path, REFUSED="1")
    assert result.returncode == BAD_INPUT
    assert not [words for words in rrfp_calls(tmp_path) if words[0] == "train"]


@pytest.mark.parametrize("script", ["launchers.sbatch", "ranks.sbatch"])
def test_an_installed_rrfp_serves_as_well(script: str, tmp_path: Path) -> None:
    processes = ["8"] if script == "launchers.sbatch" else []
    elsewhere = tmp_path / "elsewhere" / "rrfp"
    result = submit(script, "gpu/two_nodes_16", *processes, folder=tmp_path, RRFP=str(elsewhere))
    assert result.returncode == 0, result.stderr
    (tmp_path / ".venv/bin/rrfp").unlink()
    assert submit(script, "gpu/two_nodes_16", *processes, folder=tmp_path, RRFP=str(elsewhere)).returncode == 0


@pytest.mark.parametrize("script", ["launchers.sbatch", "ranks.sbatch"])
def test_rrfp_may_be_started_in_a_container_by_a_command(script: str, tmp_path: Path) -> None:
    processes = ["8"] if script == "launchers.sbatch" else []
    command = f"env IMAGE=rrfp.sif {tmp_path}/elsewhere/rrfp"
    result = submit(script, "gpu/two_nodes_16", *processes, folder=tmp_path, RRFP=command)
    assert result.returncode == 0, result.stderr
    (tmp_path / ".venv/bin/rrfp").unlink()
    assert submit(script, "gpu/two_nodes_16", *processes, folder=tmp_path, RRFP=command).returncode == 0


def test_rrfp_may_be_started_in_a_container_by_options_of_srun(tmp_path: Path) -> None:
    """Then a node has no rrfp but in the container, also for the run key."""
    command = f"--container-image=rrfp.sqsh --container-mounts=/data {tmp_path}/elsewhere/rrfp"
    result = submit("launchers.sbatch", "gpu/two_nodes_16", "8", folder=tmp_path, RRFP=command)
    assert result.returncode == 0, result.stderr
    tasks = (tmp_path / "srun.log").read_text().splitlines()
    assert [line.partition(" launch ")[0] for line in tasks] == [
        f"--nodes=1 --ntasks=1 {command}",
        f"--kill-on-bad-exit=0 {command}",
    ]
    assert rrfp_calls(tmp_path)[0] == ["launch", "--new-key", "runs/rrfp-17/run.key"]
    refused = submit("ranks.sbatch", "gpu/two_nodes_16", folder=tmp_path, RRFP=command)
    assert (refused.returncode, refused.stderr) == (
        BAD_INPUT,
        "error: RRFP begins with '--container-image=rrfp.sqsh', an option of srun, and the supervisor is not started "
        "by srun: take launchers.sbatch\n",
    )


@pytest.mark.parametrize("script", ["launchers.sbatch", "ranks.sbatch"])
@pytest.mark.parametrize(
    ("code", "num_starts", "num_requeues"),
    [(BAD_INPUT, 1, 0), (INTERRUPTED, 1, 0), (PREEMPTED, 4, 4), (PEER_LOST, 4, 2)],
)
def test_a_job_is_queued_again_where_that_may_help(
    script: str, code: int, num_starts: int, num_requeues: int, tmp_path: Path
) -> None:
    arguments = ["tpu_gpu_configs/gpu/two_nodes_16.yaml", *(["8"] if script == "launchers.sbatch" else [])]
    for _ in range(num_starts):
        result = submit(script, *arguments, folder=tmp_path, CODE=str(code), RRFP_MAX_REQUEUES="2")
        assert result.returncode == code, result.stderr
    requeued = tmp_path / "requeued"
    assert (len(requeued.read_text().splitlines()) if requeued.exists() else 0) == num_requeues
    assert not (tmp_path / "runs/rrfp-17/run.key").exists()


@pytest.mark.parametrize("script", ["launchers.sbatch", "ranks.sbatch"])
def test_requeues_are_counted_in_a_row(script: str, tmp_path: Path) -> None:
    arguments = ["tpu_gpu_configs/gpu/two_nodes_16.yaml", *(["8"] if script == "launchers.sbatch" else [])]
    for code in (PEER_LOST, PREEMPTED, PEER_LOST):
        submit(script, *arguments, folder=tmp_path, CODE=str(code), RRFP_MAX_REQUEUES="1")
    assert len((tmp_path / "requeued").read_text().splitlines()) == 3


@pytest.mark.parametrize("script", ["launchers.sbatch", "ranks.sbatch"])
def test_a_script_without_its_arguments_says_what_it_needs(script: str, tmp_path: Path) -> None:
    result = submit(script, folder=tmp_path)
    assert result.returncode != 0
    assert "give a configuration" in result.stderr


# -- Kubernetes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOB_SETS)
def test_a_job_set_starts_one_launcher_on_each_node(name: str) -> None:
    job_set = yaml.safe_load((CONFIGS / "kubernetes" / name).read_text())
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job_set["spec"]["network"]["enableDNSHostnames"] is True
    assert job_set["spec"]["network"]["publishNotReadyAddresses"] is True
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert replicated["replicas"] == 1
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["rrfp", "launch"]
    resource, devices = JOB_SETS[name]
    assert container["resources"]["limits"] == {resource: devices}
    for node in range(job["completions"]):
        words = [word.replace("$(JOB_COMPLETION_INDEX)", str(node)) for word in container["args"]]
        settings, loaded = check_launch(words, RunKey.generate().environment())
        assert (settings.node_rank, settings.num_nodes) == (node, job["completions"])
        layout = layout_of(loaded, settings.num_ranks)
        assert layout.num_devices == settings.num_nodes * devices
        assert layout.devices_per_rank * settings.num_processes == devices
        host = f"{job_set['metadata']['name']}-{replicated['name']}-0-0.{job_set['metadata']['name']}"
        assert settings.head is not None
        assert settings.head.host == host
        assert settings.interface, "a name that is not known yet must not be looked up to choose an interface"
        ports = {port["containerPort"] for port in container["ports"]}
        assert ports == {settings.head.port, settings.head.port + 1}
        assert loaded.run.run_dir is not None
        assert any(loaded.run.run_dir.startswith(mount["mountPath"]) for mount in container["volumeMounts"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("name", JOB_SETS)
def test_a_job_set_restarts_as_a_whole_except_where_it_would_end_alike(name: str) -> None:
    spec = yaml.safe_load((CONFIGS / "kubernetes" / name).read_text())["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert spec["failurePolicy"]["maxRestarts"] > 0
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert job["backoffLimit"] == 0
    (pod_rule,) = job["podFailurePolicy"]["rules"]
    assert pod_rule["action"] == "FailJob"
    final = [BAD_INPUT, NOT_FINITE, COMPUTED_WRONGLY]
    assert pod_rule["onExitCodes"] == {"containerName": "train", "operator": "In", "values": final}
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "a failure policy of pods demands it"
    assert pod["terminationGracePeriodSeconds"] >= 60


@pytest.mark.parametrize("name", JOB_SETS)
def test_the_run_key_comes_from_a_secret_and_is_nowhere_else(name: str) -> None:
    text = (CONFIGS / "kubernetes" / name).read_text()
    container = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][
        0
    ]
    (variable,) = container["env"]
    assert variable == {
        "name": "RRFP_RUN_KEY",
        "valueFrom": {"secretKeyRef": {"name": "rrfp-run-key", "key": "key"}},
    }
    assert "create secret generic rrfp-run-key --from-file=key=run.key" in text


# -- SkyPilot --------------------------------------------------------------------------------------------------------


def test_skypilot_starts_one_launcher_on_each_node() -> None:
    task = yaml.safe_load((CONFIGS / "skypilot/train.yaml").read_text())
    kind, _, gpus = task["resources"]["accelerators"].partition(":")
    assert kind == "H100"
    rrfp, command, *words = shlex.split(task["run"])
    assert (rrfp, command) == (".venv/bin/rrfp", "launch")
    addresses = [f"10.0.0.{node}" for node in range(task["num_nodes"])]
    for node in range(task["num_nodes"]):
        told = {
            "SKYPILOT_NODE_IPS": "\n".join(addresses),
            "SKYPILOT_NODE_RANK": str(node),
            "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
            "SKYPILOT_NUM_GPUS_PER_NODE": gpus,
        }
        settings, loaded = check_launch(words, told | RunKey.generate().environment())
        assert (settings.node_rank, str(settings.head)) == (node, "10.0.0.0:8476")
        layout = layout_of(loaded, settings.num_ranks)
        assert layout.num_devices == task["num_nodes"] * int(gpus)
        assert loaded.run.run_dir is not None
        assert any(loaded.run.run_dir.startswith(folder) for folder in task["volumes"])


def test_skypilots_run_key_is_asked_for_and_nowhere_in_the_file() -> None:
    text = (CONFIGS / "skypilot/train.yaml").read_text()
    assert yaml.safe_load(text)["secrets"] == {"RRFP_RUN_KEY": None}
    assert "--secret RRFP_RUN_KEY" in text


def test_a_new_key_is_readable_by_its_owner_alone_and_serves_as_secret(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    assert launch.main(["--new-key", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert RunKey.from_environment({"RRFP_RUN_KEY": path.read_text()}).text() == RunKey.from_file(path).text()


def test_the_readme_names_every_preset_and_script() -> None:
    text = (CONFIGS / "README.md").read_text()
    folders = ("slurm", "kubernetes", "skypilot", "containers")
    for path in (*PRESETS, *(p.relative_to(CONFIGS) for folder in folders for p in CONFIGS.glob(f"{folder}/*"))):
        assert f"`{path}" in text, path
