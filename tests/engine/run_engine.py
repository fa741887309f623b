"""Run one workload in a real engine of this process and write what happened as JSON.

    python run_engine.py '{"model": FOLDER, "workload": "mixed", "out": FILE, "options": {...}}'

``options`` go to ``vllm.LLM``. One engine a process: the engine keeps global state.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
               "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}

from workloads import WORKLOADS, Outputs, Wave

COMMON = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "bfloat16", "disable_log_stats": False,
          "seed": 0}


def count_steps(worker: Any) -> None:
    """In a worker: note (write_pos, is_flush) of every live row of every replay step from now on."""
    from replayssm_cute import dispatch, mamba2

    op = mamba2.selective_state_update_replayssm_output_only
    worker.replay_steps = []

    def noting(*args: Any) -> Any:
        x, write_pos, is_flush, slots, null = args[1], *args[14:16], *args[17:19]
        live = (slots[:, 0] != null)[:x.shape[0]]
        rows = zip(write_pos[:x.shape[0]][live].tolist(), is_flush[:x.shape[0]][live].tolist(), strict=True)
        worker.replay_steps.append(sorted(rows))
        return op(*args)

    mamba2.selective_state_update_replayssm_output_only = noting
    dispatch.served.clear()


def read_steps(worker: Any) -> dict[str, Any]:
    from replayssm_cute import dispatch

    served = {backend: n for (_, backend), n in dispatch.served.items()}
    return {"served": served, "steps": worker.replay_steps}


def record_schedule(llm: Any) -> list[list[tuple[int, int, int]]]:
    """Every decode step from now on: (tokens computed, tokens in the step, tokens when admitted) a row."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule, admitted = scheduler.schedule, {}
    steps: list[list[tuple[int, int, int]]] = []

    def recording(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        computed = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        for name in (*computed, *cached.resumed_req_ids):
            admitted[name] = scheduler.requests[name].num_tokens
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        steps.append([(computed[name], count, admitted[name])
                      for name, count in output.num_scheduled_tokens.items() if count == 1 and computed[name] > 0])
        return output

    scheduler.schedule = recording
    return steps


def serve(llm: Any, wave: Wave, outputs: Outputs) -> dict[str, Any]:
    """Run a wave to its end, greedily. Adds to ``outputs``; returns tokens and their two best logprobs."""
    from vllm import SamplingParams

    waiting, step, done = sorted(wave(outputs), key=lambda r: r.step), 0, {}
    prompts = {r.name: list(r.prompt) for r in waiting}
    engine = llm.llm_engine
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0].step <= step:
            request = waiting.pop(0)
            engine.add_request(request.name, {"prompt_token_ids": list(request.prompt)}, SamplingParams(
                temperature=0, max_tokens=request.output, ignore_eos=True, logprobs=2, detokenize=False))
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        step += 1
    outputs |= {name: list(output.outputs[0].token_ids) for name, output in done.items()}
    return {name: {"prompt": prompts[name], "tokens": outputs[name], "cached": output.num_cached_tokens,
                   "logprobs": [sorted((p.logprob for p in best.values()), reverse=True)[:2]
                                for best in output.outputs[0].logprobs]}
            for name, output in done.items()}


def prefill_logprobs(llm: Any, requests: dict[str, Any]) -> dict[str, list[float]]:
    """Logprobs of the generated tokens when prompt and answer are read as one prompt, in chunks."""
    from vllm import SamplingParams

    texts = {name: r["prompt"] + r["tokens"] for name, r in requests.items()}
    found = llm.generate([{"prompt_token_ids": t} for t in texts.values()],
                         SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False),
                         use_tqdm=False)
    return {name: [best[token].logprob for best, token in zip(out.prompt_logprobs, text, strict=True)
                   if best is not None][len(requests[name]["prompt"]) - 1:]
            for (name, text), out in zip(texts.items(), found, strict=True)}


def main() -> None:
    case = json.loads(sys.argv[1])
    from vllm import LLM

    llm = LLM(model=case["model"], **COMMON, **case["options"])
    llm.collective_rpc(count_steps)
    schedule = record_schedule(llm)
    outputs: Outputs = {}
    requests: dict[str, Any] = {}
    for wave in WORKLOADS[case["workload"]]:
        requests |= serve(llm, wave, outputs)
    metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    config = llm.llm_engine.vllm_config
    result = {"requests": requests, "schedule": list(schedule), "workers": llm.collective_rpc(read_steps),
              "preemptions": metrics["vllm:num_preemptions"], "prefix_hits": metrics["vllm:prefix_cache_hits"],
              "cache_mode": config.cache_config.mamba_cache_mode,
              "async_scheduling": config.scheduler_config.async_scheduling,
              "prefill": prefill_logprobs(llm, requests)}
    Path(case["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
