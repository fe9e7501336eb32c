"""What only a CUDA device can show. Without one these are skipped."""

import subprocess
import sys
import warnings

import pytest
import torch
from builders import save_tiny

import qwen_scratch
from qwen_scratch import KVCache, SamplingParams, load_model
from qwen_scratch.captured import CapturedQwen
from qwen_scratch.sampling import Sampler

pytestmark = pytest.mark.gpu
IDS = torch.tensor([[3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64]])


@pytest.fixture(autouse=True)
def full_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2), (torch.float16, 1e-2)], ids=str
)
def test_logits_are_near_the_cpus(tiny, dtype, bound):
    """Prompt, warm chunk and single tokens: within `bound` of each row's largest float32 logit."""
    cpu = load_model(tiny, device="cpu", exact=True, dtype=torch.float32)(IDS)
    model = load_model(tiny, device="cuda", dtype=dtype)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    cache = KVCache(model.config, 1, 12, device="cuda", dtype=dtype)
    ids = IDS.cuda()
    parts = [ids[:, :5], ids[:, 5:10], ids[:, 10:11], ids[:, 11:]]
    for logits in (model(ids), torch.cat([model(part, cache=cache) for part in parts], 1)):
        error = (logits.cpu().float() - cpu).abs().amax(-1) / cpu.abs().amax(-1)
        print(f"{dtype}: largest difference {error.max():.2e} of the row's largest logit")
        assert (error <= bound).all()


def test_same_ids_as_the_cpu(tiny):
    params = SamplingParams(temperature=0, max_new_tokens=20)
    ids = IDS[0].tolist()
    runs = [
        qwen_scratch.complete(load_model(tiny, device=d, dtype="float32"), None, ids, params) for d in ("cpu", "cuda")
    ]
    assert runs[0].token_ids == runs[1].token_ids


def test_sampling_on_the_device_repeats_with_its_seed(tiny):
    model = load_model(tiny, device="cuda")
    params = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1, seed=7, max_new_tokens=20)
    a, b = (qwen_scratch.complete(model, None, IDS[0].tolist(), params) for _ in range(2))
    assert a.token_ids == b.token_ids


def test_no_hidden_waits(tiny):
    """One token, chosen in every way, and the step itself: nothing makes the CPU wait but the one copy of the result."""
    model = load_model(tiny, device="cuda")
    cache = KVCache(model.config, 1, 40, device="cuda", dtype=model.dtype)
    logits = model(IDS.cuda(), cache=cache, last_only=True)
    model(IDS[:, :1].cuda(), cache=cache)  # captures
    step = IDS[:, 1:2].cuda()
    for options in (
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_k": 0, "top_p": 0.9, "min_p": 0.01},
    ):
        sampler = Sampler(SamplingParams(**options, repetition_penalty=1.1, presence_penalty=0.1, seed=1))
        sampler.begin([1, 2], model.config.vocab_size, model.device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampler.pick(logits[0, 0])
            model(step, cache=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_captured_step_gives_the_exact_paths_ids(tiny):
    """Past the border of a size, with ragged rows too."""
    params = SamplingParams(temperature=0, max_new_tokens=300, ignore_eos=True)
    prompts = [IDS[0].tolist(), IDS[0, :4].tolist()]
    exact, captured = (load_model(tiny, device="cuda", dtype="float32", exact=exact) for exact in (True, False))
    assert isinstance(captured, CapturedQwen)
    assert not isinstance(exact, CapturedQwen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no falling back
        ours = qwen_scratch.complete_batch(captured, None, prompts, params)
    for result, expected in zip(ours, qwen_scratch.complete_batch(exact, None, prompts, params), strict=True):
        assert result.token_ids == expected.token_ids


MEASURE = """
import sys, torch
from qwen_scratch import load_model

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

(torch.ones(8, 8, device="cuda", dtype=torch.bfloat16) @ torch.ones(8, 8, device="cuda", dtype=torch.bfloat16)).sum().item()
before = status("VmHWM")
model = load_model(sys.argv[1], device="cuda")
model(torch.tensor([[1, 2, 3]], device="cuda"), last_only=True).sum().item()
print(status("VmHWM") - before, torch.cuda.max_memory_allocated())
"""


def test_weights_do_not_stay_on_the_host(tmp_path):
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, "vocab_size": 32768}
    folder = save_tiny(tmp_path / "1gb", "qwen3", dtype=torch.bfloat16, shard="300MB", **sizes)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    out = subprocess.run([sys.executable, "-c", MEASURE, folder], check=True, capture_output=True, text=True)
    host, device = map(int, out.stdout.split())
    print(f"{stored / 2**20:.0f} MiB of weights: host peak +{host / 2**20:.0f} MiB, device {device / 2**20:.0f} MiB")
    assert host < 0.5 * stored
    assert device < 1.2 * stored
