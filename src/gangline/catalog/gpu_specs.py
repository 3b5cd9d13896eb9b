"""What GPUs can do: by the names that NVML reports, or by what people type.

Rates are dense fp16/bf16 with fp32 accumulation, no sparsity. GeForce cards run this at half the rate that data sheets
call "tensor", which accumulate in fp16. The figures stand with their sources.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gangline.plugins import Table, shown_type

# The GPUs: what their makers say, what was measured, and where each figure comes from. Data only.
#
# A rate is computed from the number of SMs, the boost clock and what one SM does in a clock (`ARCHITECTURES`), unless
# the maker states it. The SMs and the clock stay in the table as evidence: a test holds both against each other.


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuArchitecture:
    """What one kind of chip can do."""

    capability: str
    """CUDA compute capability."""
    flop_per_sm_clock: int
    """16-bit matrix FLOP (fp32 accumulation, no sparsity) of one SM in one clock; a multiply-add is two."""
    bf16: bool = True
    """Whether bfloat16 runs at that rate. Older chips emulate it, several times slower."""
    tensor_cores: bool = True
    """Without them fp32 runs at that rate, too."""
    fp16_share: float = 1.0
    """Part of that rate which products in fp16 reach."""


def _kind(
    capability: str,
    flop_per_sm_clock: int,
    *,
    bf16: bool = True,
    tensor_cores: bool = True,
    fp16_share: float = 1.0,
) -> GpuArchitecture:
    return GpuArchitecture(
        capability=capability,
        flop_per_sm_clock=flop_per_sm_clock,
        bf16=bf16,
        tensor_cores=tensor_cores,
        fp16_share=fp16_share,
    )


ARCHITECTURES: dict[str, GpuArchitecture] = {
    # No tensor cores: the fp32 rate, which 16-bit numbers reach on Pascal but not on GTX 16: a 1660 Ti does 5.2 TFLOPS
    # in fp32, 2.8 in emulated bf16 and 0.6 in fp16 with fp32 accumulation (torch-performance-test-data); a 1660 SUPER
    # 0.5 in fp16 (pytorch#121957), and on a 1650 fp16 loses as much from two rows on (pytorch#195716, vllm#54950).
    "pascal-p100": _kind("6.0", 128, bf16=False, tensor_cores=False),
    "pascal": _kind("6.1", 256, bf16=False, tensor_cores=False),
    "turing-gtx": _kind("7.5", 128, bf16=False, tensor_cores=False, fp16_share=0.11),
    "volta": _kind("7.0", 1024, bf16=False),
    # GeForce chips halve the rate of fp32 accumulation; the workstation and server cards of the same chip do not.
    "turing": _kind("7.5", 512, bf16=False),
    "turing-pro": _kind("7.5", 1024, bf16=False),
    "ampere-a100": _kind("8.0", 2048),
    "ampere": _kind("8.6", 512),
    "ampere-pro": _kind("8.6", 1024),
    "ada": _kind("8.9", 512),
    "ada-pro": _kind("8.9", 1024),
    "hopper": _kind("9.0", 4096),
    "blackwell-b200": _kind("10.0", 8192),
    "blackwell-b300": _kind("10.3", 8192),
    "blackwell": _kind("12.0", 512),
    "blackwell-pro": _kind("12.0", 1024),
    "blackwell-gb10": _kind("12.1", 1024),
}

SOURCES: dict[str, str] = {
    "wikipedia": "Wikipedia, List of Nvidia graphics processing units and Nvidia Tesla, as extracted in"
    " github.com/voidful/gpu-info-api (branch gpu-data): SMs, boost clock, memory, bandwidth, board power.",
    "wikipedia+": "As `wikipedia`, but a figure there contradicts the maker's, or what nvidia-smi shows; the maker's is"
    " used: 4060 Ti 2535 MHz and 165 W, H200 4800 GB/s, L40 at half rate (181 TFLOPS), A10G 80 SMs and 300 W,"
    " RTX 5050 2572 MHz, 320 GB/s and 130 W, H100 NVL 1545 MHz for its tensor cores.",
    "laptop": "NVIDIA's comparison pages of GeForce laptop GPUs: the highest boost clock and the highest TGP without"
    " Dynamic Boost. From general knowledge, not read again; the lower ends of the same ranges agree with"
    " huggingface.js hardware-nvidia.ts, SMs and memory with Wikipedia.",
    "datasheet": "NVIDIA's data sheet of the card, the dense rate being half of the one with sparsity. From general"
    " knowledge, not read again for this table.",
    "disputed": "Wikipedia's list, which has 2617 MHz for the PRO 4000, 4500 and 5000. huggingface.js"
    " hardware-nvidia.ts and technical.city give up to a fifth less (2055 to 2407 MHz), hmc-tech.com half the tensor"
    " rate. The full rate is measured for the PRO 6000 only: NOT VERIFIED for the others.",
    "unverified": "General knowledge; no second source was found. NOT VERIFIED.",
    "names": "Names as in the table of compatible GPUs of github.com/NVIDIA/open-gpu-kernel-modules (README, driver"
    " 595.45.04); those of cards before Turing from published nvidia-smi outputs.",
    "nvidia-smi": "Visible memory: total of published nvidia-smi outputs, drivers from 525 on (older ones subtract"
    " what the driver keeps for itself). ECC as it is by default.",
    "matmul": "Measured matmul: github.com/mag-/gpu_benchmark, ml-engineering (S. Bekman) maximum achievable FLOPS,"
    " gpu-flops-bench, github.com/zzc0721/torch-performance-test-data (bf16; fp16 before Ampere). Middle of the range"
    " where several are given; laptop GPUs at whatever power their owner gave them.",
}
"""Short names of sources -> what is meant. `names`, `nvidia-smi` and `matmul` hold for their columns as a whole."""

# The first row that fits is what a short name means (`a100`, `h100`, `3080`): the commonest card, and of two memory
# sizes under one name (NVML does not tell them apart) the smaller.
#
# MHz: the maker's boost clock, of laptop GPUs the highest of the range. GB: as sold; MiB: as nvidia-smi shows it.
# W: board power, of laptop GPUs the highest TGP without Dynamic Boost. stated: TFLOPS by the maker; matmul: TFLOPS as
# measured. -: not known.
TABLE = """
name                                            |architecture  |SMs| MHz| GB|   MiB|GB/s|   W|stated|matmul|source

GeForce GTX 1060 6GB                            |pascal        | 10|1708|  6|     -| 192| 120|     -|     -|wikipedia
GeForce GTX 1070                                |pascal        | 15|1683|  8|     -| 256| 150|     -|     -|wikipedia
GeForce GTX 1070 Ti                             |pascal        | 19|1683|  8|     -| 256| 180|     -|     -|wikipedia
GeForce GTX 1080                                |pascal        | 20|1733|  8|     -| 320| 180|     -|     -|wikipedia
GeForce GTX 1080 Ti                             |pascal        | 28|1582| 11| 11264| 484| 250|     -|   9.9|wikipedia
GeForce GTX 1650                                |turing-gtx    | 14|1665|  4|     -| 128|  75|     -|     -|wikipedia
GeForce GTX 1650 SUPER                          |turing-gtx    | 20|1725|  4|     -| 192| 100|     -|     -|wikipedia
GeForce GTX 1660                                |turing-gtx    | 22|1785|  6|  6144| 192| 120|     -|     -|wikipedia
GeForce GTX 1660 SUPER                          |turing-gtx    | 22|1785|  6|     -| 336| 125|     -|     -|wikipedia
GeForce GTX 1660 Ti                             |turing-gtx    | 24|1770|  6|     -| 288| 120|     -|   5.2|wikipedia
GeForce GTX 1660 Ti with Max-Q Design           |turing-gtx    | 24|1335|  6|     -| 288|  60|     -|     -|wikipedia

GeForce RTX 2060                                |turing        | 30|1680|  6|     -| 336| 160|    26|     -|wikipedia
GeForce RTX 2060                                |turing        | 34|1650| 12|     -| 336| 185|     -|     -|wikipedia
GeForce RTX 2060 SUPER                          |turing        | 34|1650|  8|     -| 448| 175|     -|     -|wikipedia
GeForce RTX 2070                                |turing        | 36|1620|  8|     -| 448| 175|     -|  31.5|wikipedia
GeForce RTX 2070 SUPER                          |turing        | 40|1770|  8|     -| 448| 215|    36|     -|wikipedia
GeForce RTX 2080                                |turing        | 46|1710|  8|     -| 448| 215|     -|    39|wikipedia
GeForce RTX 2080 SUPER                          |turing        | 48|1815|  8|     -| 496| 250|     -|     -|wikipedia
GeForce RTX 2080 Ti                             |turing        | 68|1545| 11| 11264| 616| 250|    54|  58.6|wikipedia
GeForce RTX 2060 with Max-Q Design              |turing        | 30|1175|  6|     -| 264|  65|     -|     -|wikipedia
GeForce RTX 2070 with Max-Q Design              |turing        | 36|1185|  8|     -| 448|  80|     -|     -|wikipedia
GeForce RTX 2080 with Max-Q Design              |turing        | 46|1095|  8|     -| 384|  80|     -|     -|wikipedia
TITAN RTX                                       |turing-pro    | 72|1770| 24|     -| 672| 280|     -|     -|datasheet
Quadro RTX 4000                                 |turing-pro    | 36|1545|  8|     -| 416| 160|     -|     -|wikipedia
Quadro RTX 5000                                 |turing-pro    | 48|1815| 16|     -| 448| 230|     -|     -|wikipedia
Quadro RTX 6000                                 |turing-pro    | 72|1770| 24| 24576| 672| 260|     -|     -|wikipedia
Quadro RTX 8000                                 |turing-pro    | 72|1770| 48| 49152| 672| 260|     -|     -|wikipedia

GeForce RTX 3050                                |ampere        | 20|1777|  8|     -| 224| 130|    18|     -|wikipedia
GeForce RTX 3050                                |ampere        | 18|1470|  6|     -| 168|  70|     -|     -|wikipedia
GeForce RTX 3060                                |ampere        | 28|1777| 12| 12288| 360| 170|  25.5|     -|wikipedia
GeForce RTX 3060                                |ampere        | 28|1777|  8|     -| 240| 170|  25.5|     -|wikipedia
GeForce RTX 3060 Ti                             |ampere        | 38|1665|  8|     -| 448| 200|    32|  36.5|wikipedia
GeForce RTX 3070                                |ampere        | 46|1725|  8|  8192| 448| 220|  40.6|    42|wikipedia
GeForce RTX 3070 Ti                             |ampere        | 48|1770|  8|  8192| 608| 290|  43.5|     -|wikipedia
GeForce RTX 3080                                |ampere        | 68|1710| 10| 10240| 760| 320|  59.5|  64.4|wikipedia
GeForce RTX 3080                                |ampere        | 70|1710| 12|     -| 912| 350|     -|     -|wikipedia
GeForce RTX 3080 Ti                             |ampere        | 80|1665| 12| 12288| 912| 350|    68|    77|wikipedia
GeForce RTX 3090                                |ampere        | 82|1695| 24| 24576| 936| 350|    71|    78|wikipedia
GeForce RTX 3090 Ti                             |ampere        | 84|1860| 24| 24564|1008| 450|    80|    86|wikipedia
GeForce RTX 3050 Laptop GPU                     |ampere        | 16|1740|  4|  4096| 192|  80|     -|  15.2|laptop
GeForce RTX 3050 Ti Laptop GPU                  |ampere        | 20|1695|  4|     -| 192|  80|     -|  18.7|laptop
GeForce RTX 3060 Laptop GPU                     |ampere        | 30|1703|  6|  6144| 336| 115|     -|  25.9|laptop
GeForce RTX 3070 Laptop GPU                     |ampere        | 40|1620|  8|     -| 448| 125|     -|    34|laptop
GeForce RTX 3070 Ti Laptop GPU                  |ampere        | 46|1485|  8|     -| 448| 125|    35|    34|laptop
GeForce RTX 3080 Laptop GPU                     |ampere        | 48|1710|  8|     -| 448| 150|     -|    36|laptop
GeForce RTX 3080 Laptop GPU                     |ampere        | 48|1710| 16|     -| 448| 150|     -|    36|laptop
GeForce RTX 3080 Ti Laptop GPU                  |ampere        | 58|1590| 16|     -| 512| 150|     -|     -|laptop
RTX A2000                                       |ampere-pro    | 26|1200|  6|  6138| 288|  70|     -|     -|wikipedia
RTX A2000 12GB                                  |ampere-pro    | 26|1200| 12|     -| 288|  70|     -|  36.6|wikipedia
RTX A4000                                       |ampere-pro    | 48|1560| 16| 16376| 448| 140|     -|    64|wikipedia
RTX A4500                                       |ampere-pro    | 56|1650| 20| 20470| 640| 200|     -|     -|wikipedia
RTX A5000                                       |ampere-pro    | 64|1695| 24| 24564| 768| 230|   111|    94|wikipedia
RTX A5500                                       |ampere-pro    | 80|1665| 24|     -| 768| 230|     -|     -|wikipedia
RTX A6000                                       |ampere-pro    | 84|1800| 48| 49140| 768| 300|   155|   131|wikipedia
RTX A2000 Laptop GPU                            |ampere-pro    | 20|1687|  4|     -| 192|  95|     -|     -|wikipedia
RTX A3000 Laptop GPU                            |ampere-pro    | 32|1230|  6|     -| 264|  70|     -|     -|wikipedia
RTX A4000 Laptop GPU                            |ampere-pro    | 40|1680|  8|     -| 384| 140|     -|     -|wikipedia
RTX A5000 Laptop GPU                            |ampere-pro    | 48|1575| 16|     -| 448| 150|     -|     -|wikipedia

GeForce RTX 4060                                |ada           | 24|2460|  8|  8188| 272| 115|    30|    32|wikipedia
GeForce RTX 4060 Ti                             |ada           | 34|2535|  8|  8188| 288| 160|    44|     -|wikipedia+
GeForce RTX 4060 Ti                             |ada           | 34|2535| 16| 16380| 288| 165|    44|  42.7|wikipedia+
GeForce RTX 4070                                |ada           | 46|2475| 12| 12282| 504| 200|  58.3|     -|wikipedia
GeForce RTX 4070 SUPER                          |ada           | 56|2475| 12| 12282| 504| 220|    71|    75|wikipedia
GeForce RTX 4070 Ti                             |ada           | 60|2610| 12| 12282| 504| 285|    80|     -|wikipedia
GeForce RTX 4070 Ti SUPER                       |ada           | 66|2610| 16| 16376| 672| 285|    88|    91|wikipedia
GeForce RTX 4080                                |ada           | 76|2505| 16| 16376| 717| 320|  97.5|     -|wikipedia
GeForce RTX 4080 SUPER                          |ada           | 80|2550| 16|     -| 736| 320|   104|     -|wikipedia
GeForce RTX 4090                                |ada           |128|2520| 24| 24564|1008| 450|   165|   170|wikipedia
GeForce RTX 4090 D                              |ada           |114|2520| 24|     -|1008| 425|     -|   150|wikipedia
GeForce RTX 4050 Laptop GPU                     |ada           | 20|2370|  6|  6141| 192| 115|     -|     -|laptop
GeForce RTX 4060 Laptop GPU                     |ada           | 24|2370|  8|  8188| 256| 115|    29|  30.9|laptop
GeForce RTX 4070 Laptop GPU                     |ada           | 36|2175|  8|     -| 256| 115|  40.1|     -|laptop
GeForce RTX 4080 Laptop GPU                     |ada           | 58|2280| 12| 12282| 432| 150|    68|    52|laptop
GeForce RTX 4090 Laptop GPU                     |ada           | 76|2040| 16| 16376| 576| 150|    79|     -|laptop
RTX 2000 Ada Generation                         |ada-pro       | 22|2130| 16| 16380| 224|  70|     -|     -|wikipedia
RTX 4000 SFF Ada Generation                     |ada-pro       | 48|1560| 20| 20475| 280|  70|     -|    59|wikipedia
RTX 4000 Ada Generation                         |ada-pro       | 48|2175| 20| 20475| 360| 130|     -|  82.7|wikipedia
RTX 4500 Ada Generation                         |ada-pro       | 60|2580| 24| 24570| 432| 210|     -|     -|wikipedia
RTX 5000 Ada Generation                         |ada-pro       |100|2550| 32| 32760| 576| 250|     -|     -|wikipedia
RTX 5880 Ada Generation                         |ada-pro       |110|2460| 48|     -| 960| 285|     -|     -|wikipedia
RTX 6000 Ada Generation                         |ada-pro       |142|2505| 48| 49140| 960| 300|   364|   278|wikipedia
RTX 2000 Ada Generation Laptop GPU              |ada-pro       | 24|2115|  8|     -| 256| 140|     -|     -|wikipedia
RTX 4000 Ada Generation Laptop GPU              |ada-pro       | 58|1665| 12|     -| 432| 175|     -|     -|wikipedia
RTX 5000 Ada Generation Laptop GPU              |ada-pro       | 76|2115| 16|     -| 576| 175|     -|     -|wikipedia

GeForce RTX 5050                                |blackwell     | 20|2572|  8|     -| 320| 130|     -|     -|wikipedia+
GeForce RTX 5060                                |blackwell     | 30|2497|  8|  8151| 448| 145|    38|    40|wikipedia
GeForce RTX 5060 Ti                             |blackwell     | 36|2572|  8|  8151| 448| 180|    47|    48|wikipedia
GeForce RTX 5060 Ti                             |blackwell     | 36|2572| 16| 16311| 448| 180|    47|    48|wikipedia
GeForce RTX 5070                                |blackwell     | 48|2512| 12| 12227| 672| 250|  61.7|    67|wikipedia
GeForce RTX 5070 Ti                             |blackwell     | 70|2452| 16| 16303| 896| 300|  87.9|    99|wikipedia
GeForce RTX 5080                                |blackwell     | 84|2617| 16| 16303| 960| 360| 112.6| 102.7|wikipedia
GeForce RTX 5090                                |blackwell     |170|2407| 32| 32607|1792| 575| 209.5|   254|wikipedia
GeForce RTX 5090 D                              |blackwell     |170|2407| 32|     -|1792| 575| 209.5|   225|unverified
GeForce RTX 5050 Laptop GPU                     |blackwell     | 20|2662|  8|     -| 384| 100|     -|    27|laptop
GeForce RTX 5060 Laptop GPU                     |blackwell     | 26|2497|  8|  8151| 384| 100|     -|    36|laptop
GeForce RTX 5070 Laptop GPU                     |blackwell     | 36|2347|  8|  8151| 384| 100|     -|    44|laptop
GeForce RTX 5070 Ti Laptop GPU                  |blackwell     | 46|2220| 12| 12227| 672| 115|     -|    57|laptop
GeForce RTX 5080 Laptop GPU                     |blackwell     | 60|2287| 16| 16303| 896| 150|     -|    77|laptop
GeForce RTX 5090 Laptop GPU                     |blackwell     | 82|2160| 24| 24463| 896| 150|     -|    91|laptop
RTX PRO 4000 Blackwell                          |blackwell-pro | 70|2617| 24| 24467| 672| 140|     -|     -|disputed
RTX PRO 4500 Blackwell                          |blackwell-pro | 82|2617| 32| 32623| 896| 200|     -|     -|disputed
RTX PRO 5000 Blackwell                          |blackwell-pro |110|2617| 48| 48935|1344| 300|     -|     -|disputed
RTX PRO 6000 Blackwell Workstation Edition      |blackwell-pro |188|2617| 96| 97887|1792| 600|   504|   458|wikipedia
RTX PRO 6000 Blackwell Server Edition           |blackwell-pro |188|2493| 96| 97887|1597| 600|     -|   409|unverified
RTX PRO 6000 Blackwell Max-Q Workstation Edition|blackwell-pro |188|2288| 96| 97887|1792| 300|     -|     -|wikipedia
GB10                                            |blackwell-gb10| 48|2525|128|     -| 273| 140|   125|   102|unverified

Tesla P100-PCIE-16GB                            |pascal-p100   | 56|1303| 16|     -| 732| 250|     -|   8.5|wikipedia
Tesla P100-SXM2-16GB                            |pascal-p100   | 56|1480| 16|     -| 732| 300|     -|     -|wikipedia
Tesla P40                                       |pascal        | 30|1531| 24|     -| 346| 250|     -|    10|wikipedia
Tesla V100-SXM2-16GB                            |volta         | 80|1530| 16|     -| 900| 300|   125|    95|datasheet
Tesla V100-SXM2-32GB                            |volta         | 80|1530| 32| 32768| 900| 300|   125|    95|datasheet
Tesla V100-PCIE-16GB                            |volta         | 80|1370| 16|     -| 900| 250|   112|     -|wikipedia
Tesla V100-PCIE-32GB                            |volta         | 80|1370| 32|     -| 900| 250|   112|     -|wikipedia
Tesla V100S-PCIE-32GB                           |volta         | 80|1597| 32|     -|1134| 250|   130|    89|datasheet
Tesla T4                                        |turing-pro    | 40|1590| 16| 15360| 320|  70|    65|    42|wikipedia
A100-SXM4-80GB                                  |ampere-a100   |108|1410| 80| 81920|2039| 400|   312|   268|wikipedia
A100-SXM4-40GB                                  |ampere-a100   |108|1410| 40| 40960|1555| 400|   312|   247|wikipedia
A100 80GB PCIe                                  |ampere-a100   |108|1410| 80| 81920|1935| 300|   312|   256|datasheet
A100-PCIE-40GB                                  |ampere-a100   |108|1410| 40| 40960|1555| 250|   312|   238|wikipedia
A800-SXM4-80GB                                  |ampere-a100   |108|1410| 80| 81920|2039| 400|   312|   266|datasheet
A800 80GB PCIe                                  |ampere-a100   |108|1410| 80| 81920|1935| 300|   312|     -|datasheet
A30                                             |ampere-a100   | 56|1440| 24| 24576| 933| 165|   165|     -|wikipedia
A40                                             |ampere-pro    | 84|1740| 48| 46068| 696| 300|   150|     -|wikipedia
A10                                             |ampere-pro    | 72|1695| 24| 23028| 600| 150|   125|     -|wikipedia
A10G                                            |ampere        | 80|1710| 24| 23028| 600| 300|    70|    70|wikipedia+
A16                                             |ampere-pro    | 10|1755| 16| 15356| 200|  62|     -|     -|datasheet
A2                                              |ampere-pro    | 10|1770| 16| 15356| 200|  60|     -|     -|wikipedia
L4                                              |ada-pro       | 58|2040| 24| 23034| 300|  72|   121|    91|wikipedia
L40                                             |ada           |142|2490| 48| 46068| 864| 300|   181|   170|wikipedia+
L40S                                            |ada-pro       |142|2520| 48| 46068| 864| 350|   362|   252|datasheet
L20                                             |ada-pro       | 92|   -| 48| 46068| 864| 275| 119.5|   114|datasheet
H100 80GB HBM3                                  |hopper        |132|1830| 80| 81559|3350| 700|   989|   808|wikipedia
H100 PCIe                                       |hopper        |114|1620| 80| 81559|2000| 350|   756|   500|wikipedia
H100 NVL                                        |hopper        |132|1545| 94| 95830|3938| 400|   835| 488.5|wikipedia+
H800                                            |hopper        |132|1830| 80| 81559|3350| 700|   989|     -|datasheet
H200                                            |hopper        |132|1830|141|143771|4800| 700|   989|   829|wikipedia+
H200 NVL                                        |hopper        |132|1545|141|143771|4800| 600|   835|     -|datasheet
H20                                             |hopper        |  -|   -| 96| 97871|4000| 500|   148|   142|datasheet
GH200 480GB                                     |hopper        |132|1830| 96| 97871|4000| 900|   989| 842.5|datasheet
GH200 120GB                                     |hopper        |132|1830| 96| 97871|4000| 900|   989|     -|datasheet
B200                                            |blackwell-b200|  -|   -|180|183359|8000|1000|  2250|  1745|datasheet
GB200                                           |blackwell-b200|  -|   -|186|189471|8000|1200|  2500|  1822|datasheet
B300 SXM6 AC                                    |blackwell-b300|  -|   -|288|275040|8000|1100|  2250|  1769|unverified
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """One line of the table; the columns' meaning is said there."""

    name: str
    architecture: str
    num_sms: int | None
    boost_mhz: float | None
    memory_gb: float
    visible_mib: int | None
    bandwidth_gb_s: float
    power_w: float
    stated_tflops: float | None
    measured_tflops: float | None
    source: str

    @property
    def computed_tflops(self) -> float | None:
        """SMs x clock x FLOP per SM and clock; None where SMs or clock are not known."""
        if self.num_sms is None or self.boost_mhz is None:
            return None
        return self.num_sms * self.boost_mhz * ARCHITECTURES[self.architecture].flop_per_sm_clock / 1e6


def _row(line: str) -> GpuRow:
    name, architecture, sms, mhz, gb, mib, gb_s, watts, stated, matmul, source = (
        cell.strip() for cell in line.split("|")
    )
    return GpuRow(
        name=name,
        architecture=architecture,
        num_sms=int(sms) if sms != "-" else None,
        boost_mhz=_number(mhz),
        memory_gb=float(gb),
        visible_mib=int(mib) if mib != "-" else None,
        bandwidth_gb_s=float(gb_s),
        power_w=float(watts),
        stated_tflops=_number(stated),
        measured_tflops=_number(matmul),
        source=source,
    )


def _number(cell: str) -> float | None:
    return None if cell == "-" else float(cell)


ROWS: tuple[GpuRow, ...] = tuple(_row(line) for line in TABLE.split("\n")[2:] if line.strip())
"""The table, in its order."""


# GPU names taken apart: what people type, and what NVML says, as sets of words that can be compared.


_MAKERS = frozenset({"nvidia", "geforce", "rtx", "gtx", "tesla", "quadro"})
_NOISE = _MAKERS | {"gpu", "graphics", "card", "design", "with", "generation", "edition", "blackwell"}
"""Words that tell no two cards of the table apart."""
_SAME = {"mobile": "laptop", "notebook": "laptop", "s": "super", "m": "laptop", "ws": "workstation", "spark": "gb10"}
_WEAK = frozenset({"laptop", "maxq", "ti", "super", "sxm", "pcie", "nvl", "pro", "ada", "sff", "workstation", "server"})
"""Words that say something of a card, but not which one it is."""


@functools.lru_cache(maxsize=1024)
def words(text: str) -> frozenset[str]:
    """The words that identify a card: "GeForce RTX 4070 Ti SUPER", "rtx4070tisuper" -> 4070, ti, super."""
    plain = re.sub(r"max[-_ ]?q", " maxq ", text.lower())
    plain = re.sub(r"[^a-z0-9]+", " ", plain)
    plain = re.sub(rf"\b({'|'.join(_MAKERS)})(?=[a-z]*\d)", r"\1 ", plain)
    plain = re.sub(r"\b(\d{4})(?=[a-z])", r"\1 ", plain)
    plain = re.sub(r"\b(ti|super)(?=(super|laptop|mobile)\b)", r"\1 ", plain)
    plain = re.sub(r"\b(\d+) ?(?:gb?|gib)\b", r"\1gb", plain)
    plain = re.sub(r"\bsxm\d?\b", "sxm", plain)
    plain = plain.replace("dgx spark", "spark")
    return frozenset(_SAME.get(word, word) for word in plain.split()) - _NOISE


def is_memory(word: str) -> bool:
    """Whether a word is a size, such as "80gb"."""
    return re.fullmatch(r"\d+gb", word) is not None


def naming(wanted: frozenset[str]) -> frozenset[str]:
    """The words among them that say which card it is: "4070", not "laptop" or "80gb"."""
    return frozenset(word for word in wanted if word not in _WEAK and not is_memory(word))


_VISIBLE_SHARE = 0.98
"""Of the memory as sold, where nobody published what nvidia-smi shows. Seen: 0.99 to 1.00 without ECC, and 0.94 with
ECC on GDDR, which holds for server cards only; these are all known."""
_ALIKE = 0.65
"""From which similarity on a name is worth a suggestion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One model of GPU."""

    name: str
    """As NVML reports it, without the leading "NVIDIA "."""
    tflops: float
    """Dense 16-bit peak with fp32 accumulation, TFLOP/s. Of a laptop GPU at the highest power it is sold with."""
    bf16: bool
    """Whether bfloat16 runs at that rate; if not, only fp16 does (and on GTX 16 neither: see `fp16_share`)."""
    tensor_cores: bool
    """Without them fp32 runs at that rate, too."""
    fp16_share: float
    """Part of that rate which products in fp16 reach: 1 but on GTX 16."""
    memory_gb: float
    """As sold: GiB on GDDR cards, anything near it on others. Not what can be used."""
    visible_bytes: int | None
    """The total that NVML reports with ECC as it is by default; None where no output was found."""
    bandwidth_gb_s: float
    """Of its memory, GB/s."""
    compute_capability: str
    power_w: float
    """Board power; of a laptop GPU the highest TGP without Dynamic Boost."""
    laptop: bool
    measured_tflops: float | None
    """Best matmul that somebody measured on one, TFLOP/s."""
    source: str
    """Key of `SOURCES`."""

    @property
    def total_bytes(self) -> int:
        """What NVML reports as total, or 98 % of what was sold where that is not known."""
        return self.visible_bytes or round(self.memory_gb * 2**30 * _VISIBLE_SHARE)


def _spec(row: GpuRow) -> GpuSpec:
    architecture = ARCHITECTURES[row.architecture]
    tflops = row.stated_tflops or row.computed_tflops
    assert tflops is not None, f"{row.name}: neither a rate nor SMs and clock"
    return GpuSpec(
        name=row.name,
        tflops=round(tflops, 1),
        bf16=architecture.bf16,
        tensor_cores=architecture.tensor_cores,
        fp16_share=architecture.fp16_share,
        memory_gb=row.memory_gb,
        visible_bytes=row.visible_mib * 2**20 if row.visible_mib else None,
        bandwidth_gb_s=row.bandwidth_gb_s,
        compute_capability=architecture.capability,
        power_w=row.power_w,
        laptop=row.name.endswith((" Laptop GPU", " with Max-Q Design")),
        measured_tflops=row.measured_tflops,
        source=row.source,
    )


def _read_rows(_name: str, found: Any) -> tuple[GpuSpec, ...]:
    """The GPUs of a plug-in, which are a sequence of `GpuRow`."""
    rows = tuple(found)
    strange = [row for row in rows if not isinstance(row, GpuRow)]
    if not rows or strange:
        seen = shown_type((strange or [found])[0])
        raise TypeError(f"expected a sequence of gangline.catalog.gpu_specs.GpuRow, found {seen}")
    for row in rows:
        if row.architecture not in ARCHITECTURES:
            raise ValueError(f"{row.name}: no architecture {row.architecture!r}; known: {', '.join(ARCHITECTURES)}")
        if row.stated_tflops is None and row.computed_tflops is None:
            raise ValueError(f"{row.name}: neither a rate nor the number of SMs and their clock")
    return tuple(_spec(row) for row in rows)


GPUS: tuple[GpuSpec, ...] = tuple(_spec(row) for row in ROWS)
"""All of them. Cards of two memory sizes that NVML gives one name are two entries, the smaller or commoner first."""

GPU_TABLES: Table[tuple[GpuSpec, ...]] = Table("gangline.gpus", {}, read=_read_rows)
"""GPUs of plug-ins; their packages are imported once a name is looked for that `GPUS` does not have literally."""


def all_gpus() -> tuple[GpuSpec, ...]:
    """All of them, and those of plug-ins. A plug-in that cannot be used is passed over; `gangline plugins` names it."""
    more, _ = GPU_TABLES.load_all()
    return (*GPUS, *(gpu for rows in more.values() for gpu in rows))


def find_gpu(text: str, *, total_bytes: int | None = None) -> GpuSpec | None:
    """The GPU that NVML calls `text`, or that somebody means by it: "rtx4090", "4070 laptop", "a100-80gb", "h100".

    A short name means the desktop card, not the laptop's; of server cards the commonest: `a100` and `h100` are the SXM
    ones with 80 GB. None where nothing fits: see `suggest_gpus`.

    total_bytes: the memory that NVML reports, to tell apart cards of one name (a 3080 with 10 or 12 GB).
    """
    found = _named(GPUS, text) or _named(all_gpus(), text) or _closest(words(text))
    if not found:
        return None
    if total_bytes is None:
        return found[0]
    of_that_name = [gpu for gpu in found if gpu.name == found[0].name]
    return min(of_that_name, key=lambda gpu: abs(gpu.total_bytes - total_bytes))


def _named(gpus: Sequence[GpuSpec], text: str) -> list[GpuSpec]:
    return [gpu for gpu in gpus if gpu.name == _bare(text)]


def _bare(name: str) -> str:
    return re.sub(r"^NVIDIA ", "", name.strip())


def _closest(wanted: frozenset[str]) -> list[GpuSpec]:
    """Cards with all the words, those with the fewest further words first; the table's order decides between equals."""
    if not naming(wanted):
        return []
    fitting = [gpu for gpu in all_gpus() if wanted <= words(gpu.name) | _may_add(gpu)]
    return sorted(fitting, key=lambda gpu: sum(not is_memory(word) for word in words(gpu.name) - wanted))


def _may_add(gpu: GpuSpec) -> frozenset[str]:
    """Words that people add and NVML does not say."""
    also = {f"{gpu.memory_gb:g}gb"}
    if gpu.laptop:
        also.add("laptop")
    if gpu.name in {"H100 80GB HBM3", "H200", "H800", "B200"}:
        also.add("sxm")
    return frozenset(also)


def suggest_gpus(text: str, *, at_most: int = 5) -> list[str]:
    """Names of the table that look like `text`, the nearest first, for an error message."""
    wanted = words(text)
    likenesses = {name: _likeness(wanted, words(name)) for name in dict.fromkeys(gpu.name for gpu in all_gpus())}
    near = [name for name, (shared, alike, _) in likenesses.items() if shared or alike >= _ALIKE]
    return sorted(near, key=likenesses.__getitem__, reverse=True)[:at_most]


def _likeness(wanted: frozenset[str], theirs: frozenset[str]) -> tuple[int, float, float]:
    """How many words that name a card are the same, how alike such words are, how alike all words are."""
    return len(naming(wanted) & naming(theirs)), _ratio(naming(wanted), naming(theirs)), _ratio(wanted, theirs)


def _ratio(some: frozenset[str], others: frozenset[str]) -> float:
    return difflib.SequenceMatcher(None, " ".join(sorted(some)), " ".join(sorted(others))).ratio()


def peak_flops(name: str) -> float | None:
    """Dense fp16/bf16 peak of the GPU that NVML calls `name`, in FLOP/s; None where it is not known.

    None for laptop GPUs too: what theirs is depends on the power that the laptop gives them, and a share of a peak that
    this machine cannot reach would say nothing.
    """
    found = _named(GPUS, name) or _named(all_gpus(), name)
    return found[0].tflops * 1e12 if found and not found[0].laptop else None
