"""What of the surroundings is kept with every run and plan."""

from quantbench.store.environment import (
    installed_versions,
    relevant_environment,
)


def test_variables_that_matter_are_kept_and_others_are_not() -> None:
    given = {
        "CUDA_LAUNCH_BLOCKING": "1", "NCCL_SOCKET_IFNAME": "eth0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "AWS_SECRET_ACCESS_KEY": "x", "PATH": "/bin",
    }  # fmt: skip
    assert list(relevant_environment(given)) == [
        "CUDA_LAUNCH_BLOCKING", "NCCL_SOCKET_IFNAME", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ]  # fmt: skip


def test_versions_are_known_without_importing_anything() -> None:
    found = installed_versions()
    assert {"quantbench", "python", "os", "numpy"} <= found.keys()
