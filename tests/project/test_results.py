"""Result files have one form, are named where they are used, and docs/ says what they hold."""

import json
import re
import statistics

import pytest

from benchmarks.figures import ages, tables
from benchmarks.harness import Store

ROOT, RESULTS = tables.ROOT, tables.RESULTS
FILES = [str(path.relative_to(RESULTS)) for path in sorted(RESULTS.rglob("*.json"))]
KEYS = ["device", "driver", "jax", "commit", "date", "command", "points"]
FOLDERS = ("jaxpaged", "pallas_kernels", "benchmarks", "docs", "examples")
TEXTS = {
    path.relative_to(ROOT): path.read_text()
    for path in [
        *ROOT.glob("*.md"),
        *(p for folder in FOLDERS for end in ("py", "md") for p in (ROOT / folder).rglob(f"*.{end}")),
    ]
}


def named(text: str) -> set[str]:
    """The result files that a text names: `h100/decode.json`, or in a comment of a rule [parts_h100, pairs_h100]."""
    text = re.sub(r"\n *# *", " ", text)  # a comment of several lines as one
    brackets = re.findall(r"\[((?:\w+_h\d00[,\s]*)+)(?: of benchmarks/results/decisions/)?\]", text)
    decisions = {f"decisions/{name}.json" for found in brackets for name in re.findall(r"\w+_h\d00", found)}
    return decisions | set(re.findall(r"\b((?:h100|h200|cpu|decisions)/\w+\.json)", text))


@pytest.mark.parametrize("file", FILES)
def test_a_result_file_has_the_one_form(file):
    content = json.loads((RESULTS / file).read_text())
    assert [key for key in content if key not in ("settings", "note")] == KEYS
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", content["date"])
    assert content["points"]
    assert all(isinstance(point, dict) and point for point in content["points"].values())
    assert file.split("/")[0] in ("decisions", "cpu") or file.split("/")[0].upper() in content["device"]


def test_every_result_file_is_named_and_every_named_one_exists():
    assert set().union(*map(named, TEXTS.values())) == set(FILES)


def test_the_table_of_ages_has_every_file_and_its_commit():
    rows = dict(re.findall(r"^\| `(\S+\.json)` \| (.*) \|$", ages.PAGE.read_text(), re.MULTILINE))
    assert list(rows) == FILES, "run `python -m benchmarks.figures.ages`"
    for file, row in rows.items():
        content = json.loads((RESULTS / file).read_text())
        assert content["date"] in row
        assert f"`{content['commit']}`" in row or " before `" in row
        assert all((ROOT / path).exists() for path in ages.find_code(RESULTS / file)), f"where is what {file} measures?"


def test_the_ages_are_those_of_the_history():
    text = ages.PAGE.read_text()
    (counted_at,) = re.findall(r"^Counted at `(\w+)`", text, re.MULTILINE)
    if not ages.has_history() or ages.git("merge-base", "--is-ancestor", counted_at, "HEAD") is None:
        pytest.skip("the commits were counted in a history that is not here")
    assert ages.filled(text, counted_at) == text, "run `python -m benchmarks.figures.ages`"
    older = re.sub(r"\d+ \|$", "999 |", text, count=1, flags=re.MULTILINE)
    assert older != text
    assert ages.filled(older, counted_at) == text


INDEX = RESULTS / "decisions" / "README.md"
DECISIONS = re.findall(r"^\| `(\w+)` \| (.*) \| `(\w+)` \|$", INDEX.read_text(), re.MULTILINE)  # rule, texts, file


def test_the_index_of_decisions_has_every_file_and_the_rules_that_there_are():
    code = {path: text for path, text in TEXTS.items() if path.parts[0] in ("jaxpaged", "pallas_kernels")}
    assert {f"decisions/{file}.json" for *_, file in DECISIONS} == {f for f in FILES if f.startswith("decisions/")}
    defined = {name for text in code.values() for name in re.findall(r"^ *(?:def|class) (\w+)|^(\w+) = ", text, re.M)}
    rules = {rule for rule, *_ in DECISIONS} - {"gone"}
    missing = rules - {name for pair in defined for name in pair}
    assert not missing, f"{INDEX} names rules that the code has no more: rename them there, or write `gone`"
    ruled = {f"decisions/{file}.json" for rule, _, file in DECISIONS if rule != "gone"}
    beside = {file for file in set().union(*map(named, code.values())) if file.startswith("decisions/")}
    assert beside == ruled, f"the comments beside rules, and {INDEX}, name other files"


@pytest.mark.parametrize(("rule", "text", "file"), DECISIONS, ids=[f"{rule}-{file}" for rule, _, file in DECISIONS])
def test_a_decisions_figures_are_those_of_its_file(rule, text, file):
    def numbers(found):
        if isinstance(found, dict | list):
            for each in found.values() if isinstance(found, dict) else found:
                yield from numbers(each)
        elif isinstance(found, float | int):
            yield found

    measured = list(numbers(tables.points(f"decisions/{file}")))
    figures = re.findall(r"(\d+(?:\.\d+)?) us", text)
    assert figures
    for figure in figures:
        decimals = len(figure.partition(".")[2])
        assert any(f"{number:.{decimals}f}" == figure for number in measured), f"{file} has no {figure} us"


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_a_page_says_what_the_files_hold(page):
    text = page.read_text()
    assert tables.filled(text) == text, "run `python -m benchmarks.figures.tables`"
    before, mark, tables_and_more = text.partition("<!-- table")
    wrong = before + mark + re.sub(r"\| \d+\.\d+ \|", "| 0.0 |", tables_and_more, count=1)
    assert wrong != text
    assert tables.filled(wrong) == text


def words_of(page):
    """Its text, wherever its lines end."""
    return " ".join((ROOT / page).read_text().split())


def test_what_is_said_of_the_engine_beside_vllm_is_in_the_files():
    def over_vllm(gpu, *counts, machine=""):
        ours, vllm = (tables.points(f"{gpu}/{file}{machine}") for file in ("engine", "vllm"))
        return [ours[f"engine {count}"]["tokens_per_s"] / vllm[f"engine {count}"]["tokens_per_s"] for count in counts]

    steps = tables.points("h100/engine")["steps"]
    ours, online, vllm = (tables.points(f"h200/{file}") for file in ("engine", "engine_online", "vllm"))
    parts = over_vllm("h200", 512, 1024, 2048)
    of_slow_host = over_vllm("h200", 512, 1024, 2048, machine="_slow_host")
    to_compile = [tables.points(f"h200/{file}")["steps"]["compile_s"] for file in ("engine_slow_host", "engine")]
    first, between = (
        [of["10 a second"][wait]["p50"] for of in (online, vllm)] for wait in ("to_first_ms", "between_tokens_ms")
    )
    on_cpu = tables.points("cpu/engine_online")
    waits = [on_cpu[f"0.3 a second, slices of {name}"]["to_first_ms"]["p50"] for name in ("one step", "two steps")]
    of_slice, of_steps = (tables.points(f"decisions/slices_{gpu}") for gpu in ("h200", "h100"))
    arrivals = [
        of_steps[f"arrivals, 32 layers, 10 a second, p50 {name}"] for name in ("to the first token", "between tokens")
    ]
    at_once = of_steps["a token of 512 requests, 16 layers"]
    drawn = tables.points("h100/engine_sampled")
    sampled = [drawn[f"sampled {n}"]["tokens_per_s"] / drawn[f"engine {n}"]["tokens_per_s"] for n in (2048, 1024, 512)]
    rollout = tables.points("h200/engine_rollout")
    rounds = [
        of[f"{name}round {i}"]["tokens_per_s"] for of, name in ((rollout, ""), (vllm, "rollout, ")) for i in (1, 2)
    ]
    first_rounds = [
        tables.points(f"h200/{file}_slow_host")["round 1"]["tokens_per_s"] for file in ("engine_rollout", "vllm")
    ]
    for page, figures in {
        "docs/engine.md": [
            "gives {:.2f}, {:.2f} and {:.2f} times vLLM's tokens a second for 512, 1,024 and 2,048 requests".format(
                *parts
            ),
            "whose host needs {:.0f} s instead of {:.0f} s to compile the engine".format(*to_compile),
            "it gives {:.2f}, {:.2f} and {:.2f} times vLLM's".format(*of_slow_host),
            f"Compiling that engine took {steps['compile_s']:.0f} s",
            "gives {:.2f}, {:.2f} and {:.2f} of the tokens of 2,048, 1,024 and 512 greedy requests".format(*sampled),
            "after {:.0f} ms in slices of one step, and after {:.0f} ms in slices of two".format(*waits),
            f"gave the first token after {arrivals[0]['2_steps_at_once_us'] / 1e3:.1f} ms",
            f"{of_slice['leaving the call']['us']:,} us from its last step to its end",
            f"{of_slice['entering the call']['us']:,} us pass from a call to its first kernel",
            *(
                "| {} | {:.1f} | {:.1f} |".format(name, *(of[key] / 1e3 for of in arrivals))
                for name, key in {
                    "of two steps, ended by a condition": "unknown_number_us",
                    "of three steps": "3_steps_us",
                    "of two": "2_steps_us",
                    "of one, the default for an 8B model": "1_step_us",
                }.items()
            ),
            "get a token every {:.1f} us, and every {:.1f} us in slices of two".format(
                *(at_once[key] for key in ("1_step_us", "2_steps_us"))
            ),
            f"it was every {at_once['2_steps_loop_us']:.1f} us in slices of two",
            f"a step takes {steps['single_64_ms']:.1f} ms with 64 rows, {steps['single_128_ms']:.1f} ms with 128",
            f"{steps['single_384_ms']:.1f} ms with 384, and {steps['mixed_1024_ms']:.0f} ms with 1,024 rows",
            f"the scheduler's `plan` and `commit` take {steps['scheduling_us']:.0f} us of it",
        ],
        "docs/coming_from/vllm.md": [
            f"gives {parts[1]:.2f} times the tokens a second of vLLM 0.25.1 for 1,024 requests at once",
            f"{parts[2]:.2f} times for 2,048",
            "after {:.1f} ms (vLLM {:.1f}), and the others".format(*first),
            "the others {:.1f} ms apart (vLLM {:.1f}; medians".format(*between),
        ],
        "docs/serving.md": [
            f"first token after {first[0]:.1f} ms, and the others {between[0]:.1f} ms apart",
        ],
        "docs/reinforcement_learning.md": [
            "give {:,.0f} and {:,.0f} tokens a second on an H200".format(*rounds[:2]),
            "gives {:,.0f} and {:,.0f} on the same machine".format(*rounds[2:]),
            "the first round gives {:,.0f}, and vLLM's {:,.0f}".format(*first_rounds),
            f"comes {rollout['update']['to_first_token_s'] * 1e3:.0f} ms after the call of `update_weights`",
        ],
    }.items():
        text = words_of(page)
        assert not [figure for figure in figures if figure not in text], page


def test_what_is_said_of_groups_on_a_gpu_is_in_the_files():
    found, long = tables.points("h200/groups"), tables.points("h100/groups_engine")
    text = words_of("docs/allocator.md")
    for figure in (
        f"groups have room for {found['groups']['seats']} of them at once, one table for {found['one table']['seats']}",
        f"give {found['gain']['tokens']:.2f} times the tokens a second with chunks of 256",
        f"there is room for {found['groups, chunks of 1024']['seats']}",
        f"and {found['gain, chunks of 1024']['tokens']:.2f} times the tokens",
        f"{long['groups']['seats']} instead of {long['one table']['seats']} at once",
        f"give {long['gain']['tokens']:.2f} times the tokens on an H100",
        "takes {groups_1_us:.0f} us with one group and {groups_4_us:.0f} with four".format(**found["allocator"]),
    ):
        assert figure in text


def test_what_is_said_of_prefixes_that_are_read_once_is_in_the_file():
    found, text = tables.points("h100/engine_prefixes_8b"), words_of("docs/engine.md")
    of_vllm = tables.points("h100/vllm_prefixes")["long completions"]
    assert f"gave {of_vllm['tokens_per_s']:,.0f} for the {of_vllm['requests']} long completions" in text
    for row, words in {
        "system prompt": "that are the same in all gave {:,.0f} and {:,.0f}",
        "long completions": "8 completions each gave {:,.0f} tokens a second, and {:,.0f} where every request read",
        "apart": "512 prompts with nothing in common gave {:,.0f} and {:,.0f}",
    }.items():
        assert words.format(*(found[f"{row}, {way}"]["tokens_per_s"] for way in ("on", "each"))) in text


def test_what_is_said_of_the_server_is_in_the_files():
    on_cpu, on_gpu = tables.points("cpu/engine_server")["server"], tables.points("h100/engine_server")
    text = words_of("docs/serving.md")
    for figure in (
        f"they got {on_cpu['of_engine']:.0%} of the tokens a second of the engine without a server",
        f"sockets took {on_cpu['event_loop_us_per_token']:.0f} us of processor time for a token",
        "on an H100 they got {:.0%}, and {:.0%} where the event loop worked for 25% of the time".format(
            *(on_gpu[f"server, a share of {share}"]["of_engine"] for share in (0.15, 0.25))
        ),
    ):
        assert figure in text


def test_what_is_said_of_host_memory_is_in_the_files():
    found, on_h200, on_cpu = (tables.points(f"{machine}/host_tier") for machine in ("h100", "h200", "cpu"))
    evicted, stages, talks = found["evicted"], found["stages"], found["conversations"]
    room = tables.points("decisions/host_room_h100")
    anywhere, kept = (room[f"{where}, one program"]["call_us"] / 1e3 for where in ("no room", "room"))
    losses = [1 - of["nothing to find"]["part"] for of in (found, on_h200)]
    gains = [of["conversations"]["gain"] - 1 for of in (found, on_h200)]
    slow, quick = (point["seconds"] for point in tables.points("decisions/room_h200").values())
    computed = talks["computed"] / found["conversations without host memory"]["computed"]
    text = words_of("docs/engine.md")
    for figure in (
        f"if the pool still has the prompt, its first token comes after {evicted['pool_ms']:.0f} ms",
        f"To copy its {stages['megabytes']:,.0f} MB to the device takes {stages['to_device']:.0f} ms by itself",
        f"the conversations compute {computed:.0%} of the tokens",
        f"prompts with nothing in common {100 * losses[0]:.0f} to {losses[1]:.0%} fewer",
        f"give {100 * gains[0]:.0f} to {gains[1]:.0%} more tokens a second",
        f"a call took {anywhere:.1f} ms instead of {kept:.1f} ms",
        f"512 requests took {quick} s with it, and {slow} s without",
        f"gave {on_cpu['conversations']['gain']:.1f} times the tokens a second with host memory",
    ):
        assert figure in text


def test_what_is_said_of_scoring_is_in_the_file():
    found, text = tables.points("h100/engine_score"), words_of("docs/engine.md")
    last, rates = found["round 2"], found["rates"]
    wide = tables.points("h100/engine_score_wide")["round 2"]
    for figure in (
        f"scores {wide['tokens_per_s']:,.0f} tokens a second, {wide['of_floor']:.0%} of the floor",
        f"wait up to {wide['seconds'] / wide['steps'] * 1000:.0f} ms",
        f"are scored at {last['tokens_per_s']:,.0f} tokens a second. That is {last['of_floor']:.0%} of the floor",
        f"{rates['hot_tflops']:.0f} TFLOP/s; before, it has {rates['cold_tflops']:.0f}",
    ):
        assert figure in text


def test_the_figures_between_the_tables_of_performance_are_those_of_the_files():
    def ratio(file, of, to, key="us"):
        found = tables.points(file)
        return found[of][key] / found[to][key]

    def slower(block_size):
        found = tables.points("h100/read_order")[f"32/8 8x2048 block_size={block_size}"]
        return found["shuffled"] / found["in_order"] - 1

    def of_prompts(peer):
        found = tables.points("h100/prefill")
        names = [name for name in found if name.endswith(" mosaic_gpu")]
        pairs = [(found[name], found.get(name.replace("mosaic_gpu", peer))) for name in names]
        ratios = [ours["us"] / theirs["us"] for ours, theirs in pairs if theirs]
        return statistics.geometric_mean(ratios), len(ratios)

    sweep = [tables.points("h100/partitions")[f"sweep {batch}"]["192"] for batch in (132, 133)]
    tree = tables.points("h100/tree")
    fa3_paged, fa3, cudnn = map(of_prompts, ("fa3 paged", "fa3", "cudnn"))
    runs = tables.points("decisions/prefill_ahead_h100")
    house = tables.points("decisions/house_h200")["decode | 32/8 64x8192 cache=float8_e4m3fn scale=head"]
    latent, former = (tables.points(f"h100/{name}") for name in ("engine_v2lite", "engine_v2lite_384"))
    profile, run = tables.points("h100/engine_profile"), former["engine 1024"]
    of_latent, of_former = ([of[f"engine {n}"]["of_floor"] for n in (1024, 512)] for of in (latent, former))
    of_8b = [tables.points("h100/engine")[f"engine {count}"]["of_floor"] for count in (1024, 512)]
    events = [profile[kind]["events"] for kind in ("single_64", "single_384", "mixed_1024")]
    new, old = (runs[f"32/8 64xragged1024 q_len=all | {form}"]["runs"] for form in ("new", "old"))
    ways = tables.points("decisions/joined_h100")
    joined = [ways[way]["single_64_us"] / 1e3 for way in ("products of the same rows joined", "each product by itself")]
    text = words_of("docs/performance.md")
    for figure in (
        f"132 sequences of 192 tokens take {sweep[0]:.1f} us, 133 take {sweep[1]:.1f} us",
        f"rises by {slower(16):.1%} with blocks of 16, and by {slower(256):.1%} with blocks of 256",
        f"take {tree['32/8 64x2048 q_len=8 tree=1']['us']:.1f} us as a tree",
        f"and {tree['32/8 64x2048 q_len=8']['us']:.1f} us as a chain",
        f"takes {fa3_paged[0]:.2f} of FA3's time on the same cache ({fa3_paged[1]} points of the file)",
        f"{fa3[0]:.2f} of FA3's ({fa3[1]} points) and {cudnn[0]:.2f} of cuDNN's ({cudnn[1]} points)",
        f"it took {min(new):.0f} to {max(new):.0f} us, the unchanged kernel {min(old):.0f} to {max(old):.0f}",
        f"Today's kernel takes {house['us']:.0f} us on an H200 for 64 x 8192 in float8_e4m3fn",
        f"takes {ratio('cpu/generate', 'batch 1', 'batch 16', 'steps_per_s'):.1f} times as long as a step of one",
        f"gives {ratio('cpu/generate', 'batch 16', 'batch 1', 'tokens_per_s'):.1f} times the tokens per second",
        "{:.0f} kernels and copies with 64 rows of single tokens, {:.0f} with 384, and {:.0f} with 1,024".format(
            *events
        ),
        "{:.0%} of the floor with 1,024 requests and {:.0%} with 512".format(*of_latent),
        "it had 384 seats, and reached {:.0%} and {:.0%}".format(*of_former),
        "where the model above reaches {:.0%} and {:.0%}".format(*of_8b),
        f"The run took {run['seconds']:.2f} s",
        f"70% of the floor would be {run['seconds'] * run['of_floor'] / 0.7:.2f} s",
        "DeepSeek-V2-Lite's shape takes {:.2f} ms so, and {:.2f} ms without".format(*joined),
    ):
        assert figure in text


def test_every_table_stands_on_a_page():
    found = [name for page in tables.PAGES for name in re.findall(r"<!-- table: (.*?) -->", page.read_text())]
    assert set(found) == set(tables.TABLES)


def test_a_store_goes_on_with_its_own_file_and_refuses_another_machines(tmp_path):
    path = tmp_path / "h100" / "toy.json"
    Store(path, seed=1).add("first", {"us": 1.0})
    again = Store(path, seed=1)
    again.add("second", {"us": 2.0})
    content = json.loads(path.read_text())
    assert list(content["points"]) == ["first", "second"]
    assert [key for key in content if key != "settings"] == KEYS
    with pytest.raises(SystemExit, match="other settings"):
        Store(path, seed=2)
    path.write_text(json.dumps(content | {"device": "another"}))
    with pytest.raises(SystemExit, match="another machine"):
        Store(path, seed=1)
