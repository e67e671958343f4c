"""`headway simulate` from its command line: the same answer each time, and errors that say where."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headway_cli.__main__ import main
from headway_engine.messages import Gauges, StepReport
from headway_engine.protocol import Objectives
from headway_engine.telemetry import Telemetry
from support.observations import CAPACITY, COST, statistics_of

RESOURCE = """apiVersion: headway.dev/v1alpha1
kind: InferenceDeployment
metadata: {name: chat}
spec:
  model: {uri: "random://llama", maxModelLen: 4096}
  slo:
    ttft: {p95: 500ms}
    itl: {p95: 50ms}
  tuning: {interval: 5s}
"""
STEP_COST = ("--step-cost", "7,33,10,45")
TRAFFIC = ("--rate", "15", "--duration", "30")


@pytest.fixture
def resource(tmp_path: Path) -> Path:
    path = tmp_path / "chat.yaml"
    path.write_text(RESOURCE)
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["simulate", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_the_same_question_has_the_same_answer_byte_for_byte(
    resource: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another process with another hash seed agrees too: nothing hangs on the order of a set."""
    question = ["-f", str(resource), "--rate", "20", "--duration", "15", *STEP_COST, "--replicas", "2"]
    command = [sys.executable, "-m", "headway_cli", "simulate", *question, "-o", "json"]
    elsewhere = subprocess.run(command, capture_output=True, check=True, env={"PYTHONHASHSEED": "7"})
    assert elsewhere.stdout.decode() == answer(capsys, *question, "-o", "json")
    assert answer(capsys, *question) == answer(capsys, *question)


def test_the_table_tells_what_is_asked_for(resource: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Targets, goodput, moves with reasons, cost, and what was assumed."""
    said = answer(capsys, "-f", resource, *TRAFFIC, *STEP_COST, "--price", 2)
    for words in ("TTFT", "p95 500ms", "attainment", "goodput", "maxBatchTokens 2048 -> ", "binds", "USD"):
        assert words in said
    assert "a step costs 7,33,10,45 (--step-cost)" in said


def test_the_json_is_json_with_units_in_its_names(resource: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For machines: no NaN, and every move with its reason."""
    said = answer(capsys, "-f", resource, *TRAFFIC, *STEP_COST, "--price", 2, "-o", "json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    (found,) = json.loads(said, parse_constant=refuse)["simulations"]
    assert found["offered"] == found["finished"] + found["refused"]
    assert 0 <= found["attainment"] <= 1
    assert [target["name"] for target in found["targets"]] == ["TTFT", "ITL", "e2e"]
    assert all(move["why"] for move in found["moves"])
    assert found["cost"]["per_million_output_tokens"] > 0
    assert found["ticks"][0]["at_s"] == 5.0


def test_the_plot_is_a_picture_with_every_line_inside_its_panel(
    resource: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SVG, the same each time; targets are named."""
    path = tmp_path / "plan.svg"
    answer(capsys, "-f", resource, *TRAFFIC, *STEP_COST, "--plot", path)
    drawn = path.read_text()
    root = ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(f"{space}text")]
    assert {"requests/s", "TTFT p95, ms", "ITL p95, ms", "target 500", "target 50"} <= set(texts)
    lines = [line.attrib["points"].split() for line in root.iter(f"{space}polyline")]
    assert len(lines) >= 5
    corners = [tuple(map(float, point.split(","))) for line in lines for point in line]
    assert all(70 <= x <= 810 and 50 <= y <= float(root.attrib["height"]) for x, y in corners)
    answer(capsys, "-f", resource, *TRAFFIC, *STEP_COST, "--plot", path)
    assert path.read_text() == drawn


def test_find_replicas_stops_at_the_first_number_that_meets_the_slo(
    resource: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sixty requests of 512 tokens a second are too much for one."""
    question = ("-f", resource, "--rate", "60", "--duration", "20", *STEP_COST, "--find-replicas", "5")
    tried = json.loads(answer(capsys, *question, "-o", "json"))["simulations"]
    assert [found["replicas"] for found in tried] == list(range(1, len(tried) + 1))
    assert len(tried) > 1
    assert [found["meets"] for found in tried] == [False] * (len(tried) - 1) + [True]


def test_without_the_tuner_the_limits_stay(resource: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--tuning Off is the other half of a comparison."""
    said = json.loads(answer(capsys, "-f", resource, *TRAFFIC, *STEP_COST, "--tuning", "Off", "-o", "json"))
    (found,) = said["simulations"]
    assert (found["moves"], found["limits"]["max_batch_tokens"]) == ([], 2048)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*TRAFFIC,), "what a step of the engine costs is not known"),
        ((*STEP_COST,), "no traffic"),
        ((*TRAFFIC, "--step-cost", "7,33,10"), "--step-cost 7,33,10: neither a profile"),
        ((*TRAFFIC, "--step-cost", "7,33,x,1"), "DECODE_US is 'x', not a number"),
        ((*TRAFFIC, "--step-cost", "7,33,10,-1"), "KV_NS is -1, which no step can cost"),
        ((*TRAFFIC, "--step-cost", "nan,33,10,1"), "BASE_MS is nan"),
        ((*TRAFFIC, "--step-cost", "0,0,10,1"), "a step must take some time"),
        ((*TRAFFIC, *STEP_COST, "--trace", "sample"), "--trace is of no use beside --rate"),
        ((*TRAFFIC, *STEP_COST, "--scale", "2"), "--scale is of no use beside --rate"),
        (("--trace", "sample", *STEP_COST, "--prompt-tokens", "5"), "--prompt-tokens is of no use without"),
        (("--trace", "nowhere.csv", *STEP_COST), "nowhere.csv: No such file"),
        ((*TRAFFIC, *STEP_COST, "--replicas", "3", "--find-replicas", "2"), "fewer than --replicas 3"),
        ((*TRAFFIC, "--step-cost", "1e300,1,1,1"), "BASE_MS is 1e300, which no step can cost"),
        (("--rate", "1e12", "--duration", "60", *STEP_COST), "6e+13 requests"),
        (("--trace", "sample", "--scale", "1e9", *STEP_COST), "scale 1e+09: makes 4.12e+12 requests"),
        ((*TRAFFIC, "--from", "localhost"), "not an http:// URL"),
        ((*TRAFFIC, "--noise", "0.1"), "what a step of the engine costs is not known"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    resource: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    """Exit status 2, what is wrong, and no traceback."""
    assert main(["simulate", "-f", str(resource), *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--prompt-tokens", "--output-tokens", "--kv-tokens", "--replicas"])
def test_a_count_that_no_machine_has_room_for_is_refused(
    resource: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    """Before memory runs out."""
    with pytest.raises(SystemExit, match="2"):
        main(["simulate", "-f", str(resource), *TRAFFIC, *STEP_COST, option, "99999999999"])
    assert f"argument {option}: 99999999999: must be at most" in capsys.readouterr().err


def test_refusing_everybody_does_not_keep_a_target_for_gaps(
    resource: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where ITL is all that is promised, no gap at all is not a plan that works."""
    resource.write_text(RESOURCE.replace("    ttft: {p95: 500ms}\n", ""))
    question = ("--rate", "2", "--duration", "10", "--prompt-tokens", "5000", *STEP_COST, "-o", "json")
    (found,) = json.loads(answer(capsys, "-f", resource, *question))["simulations"]
    assert found["attainment"] == 0.0
    assert not found["meets"]


def test_a_bad_resource_and_a_bad_trace_name_the_field(
    resource: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same validation as in a cluster."""
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n1,many,1\n")
    assert main(["simulate", "-f", str(resource), "--trace", str(trace), *STEP_COST]) == 2
    assert "trace.csv, line 3, prompt_tokens: 'many' is not a whole number" in capsys.readouterr().err
    resource.write_text(RESOURCE + "  batching: {maxBatchTokens: 9000}\n")
    assert main(["simulate", "-f", str(resource), *TRAFFIC, *STEP_COST]) == 2
    assert "spec.batching.maxBatchTokens" in capsys.readouterr().err


def test_prompts_longer_than_the_model_are_refused_as_the_engine_would(
    resource: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They count against attainment, with the engine's own words."""
    question = ("--rate", "2", "--duration", "10", "--prompt-tokens", "5000", *STEP_COST, "-o", "json")
    (found,) = json.loads(answer(capsys, "-f", resource, *question))["simulations"]
    assert found["attainment"] == 0.0
    (refused,) = found["refusals"]
    assert refused["why"] == "too_long"
    assert "the model's limit is 4096" in refused["example"]


@pytest.fixture
def engine_url() -> Iterator[str]:
    """The management port of an engine that has measured its steps."""
    telemetry = Telemetry(Objectives(), start_time_s=1.0)
    telemetry.capacity = CAPACITY

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = telemetry.exposition() if self.path == "/metrics" else b"no metrics here"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    statistics = statistics_of(COST, steps=400)
    telemetry.record(StepReport(at_s=0.0, gauges=Gauges(statistics=statistics)), 0.0)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_running_engine_tells_its_own_step_cost_and_capacity(
    resource: Path, engine_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Close to what its steps really cost, and with its KV cache."""
    said = answer(capsys, "-f", resource, *TRAFFIC, "--from", engine_url)
    assert f"(400 steps measured at {engine_url})" in said
    assert "the KV cache holds every sequence" not in said
    line = next(line for line in said.splitlines() if "a step costs" in line)
    base_ms = float(line.split("costs ")[1].split(",")[0])
    assert base_ms == pytest.approx(7.0, rel=0.1)


def test_a_saved_status_tells_the_step_cost_too(resource: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `kubectl get infd -o yaml` prints it: microseconds, nanoseconds and picoseconds."""
    cost = "{baseMicroseconds: 7100, perPrefillTokenNanoseconds: 33000, perDecodeNanoseconds: 9000, "
    cost += "perKvTokenPicoseconds: 45000, steps: 900}"
    resource.write_text(RESOURCE + f"status: {{tuning: {{stepCost: {cost}}}}}\n")
    said = answer(capsys, "-f", resource, "--rate", "5", "--duration", "5", "--noise", "0.1")
    assert "a step costs 7.1,33,9,45 (the tuner's, from the status in the file), give or take 10%" in said


def test_what_is_no_engine_is_said_to_be_none(
    resource: Path, engine_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong page is the user's to mend; nobody there is a failure."""
    wrong = f"{engine_url}/other"
    assert main(["simulate", "-f", str(resource), *TRAFFIC, "--from", wrong]) == 2
    assert "management port is 8001" in capsys.readouterr().err
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as closed:
        port = closed.server_port
    assert main(["simulate", "-f", str(resource), *TRAFFIC, "--from", f"http://127.0.0.1:{port}"]) == 1
    assert "refused" in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    """A laptop plans for GPUs that it has not."""
    code = (
        "import sys\nsys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "import headway_cli.simulate\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
