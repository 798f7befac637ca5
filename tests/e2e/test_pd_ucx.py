"""A pair whose caches travel over UCX, by TCP and by shared memory: replies are one server's, and what cannot arrive is an error."""
import ctypes

import pytest

from conftest import EDGE_ONLY, FOLDER, ON_GPU, PROGRAM
from server_process import PairProcess, ServerProcess
from test_pd import COMMON, answer, counts, lease, of_layout, questions, wait_let_go


def has_ucx():
    try:
        ctypes.CDLL("libucp.so.0")
        return True
    except OSError:
        return False


pytestmark = [EDGE_ONLY, pytest.mark.skipif(ON_GPU, reason="UCX carries host memory"), pytest.mark.skipif(not has_ucx(), reason="libucx0 is not installed")]
UCX = {"backends": ["UCX"], "kv_lease_duration": 6}


@pytest.mark.parametrize("transports", ["tcp", "sm"])
def test_a_pair_over_ucx(server, tmp_path, monkeypatch, transports):
    monkeypatch.setenv("UCX_TLS", transports)
    prompts = questions(4)
    with PairProcess(PROGRAM, FOLDER, [*COMMON, "--deterministic"], of_layout(1, 1), of_layout(2, 2), log_folder=str(tmp_path), extra=UCX) as pair:
        wanted = [answer(server, prompt)[0]["token_ids"] for prompt in prompts]
        assert [answer(pair, prompt)[0]["token_ids"] for prompt in prompts] == wanted
        wait_let_go(pair)
        seen = counts(pair)
        assert seen["arrived"] == len(prompts) and seen["failed"] == 0 and seen["sent"] == seen["taken"] > 0, seen
        # The prefill server dies with a lease.
        params = lease(pair.prefill, prompts[0], cache_salt="lost")
        pair.prefill.process.kill()
        pair.prefill.process.wait()
        body = {"model": pair.model, "prompt": prompts[0], "max_tokens": 8, "cache_salt": "lost", "kv_transfer_params": params}
        status, reply = pair.decode.post("/v1/completions", body)
        assert status == 500 and "did not arrive" in reply["error"]["message"], reply


def test_servers_of_unlike_carriers_do_not_meet(tmp_path):
    """UCX that was asked for is not replaced by TCP in silence."""
    over_tcp = '{"kv_connector":"NixlConnector","kv_role":"kv_producer","kv_connector_extra_config":{"backends":["TCP"],"kv_lease_duration":6}}'
    with PairProcess(PROGRAM, FOLDER, COMMON, log_folder=str(tmp_path), extra=UCX) as pair, \
            ServerProcess(PROGRAM, FOLDER, [*COMMON, "--kv-transfer-config", over_tcp, "--kv-side-channel-port", "0"], str(tmp_path / "tcp")) as prefill:
        prefill.wait_ready()
        prompt = questions(1)[0]
        params = lease(prefill, prompt)
        status, reply = pair.decode.post("/v1/completions", {"model": pair.model, "prompt": prompt, "max_tokens": 4, "kv_transfer_params": params})
        assert status == 500 and "UCX" in reply["error"]["message"], reply
