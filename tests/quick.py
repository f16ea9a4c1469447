"""XLA's flags for tests: quick to compile.

Tests compile thousands of small programs and run each a few times, so the compiler's time is the suite's. Code that is not
optimized is as right and made in an eighth of the time; passes over HLO, and what the tests read there, stay as they are.
"""

from importlib.metadata import version

FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
if version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # the emitters before them are quicker; later versions have none
