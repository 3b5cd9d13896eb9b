"""As a program of its own: the options of the launchers that are installed here, and the variables that accelerate sets.

    python -m tests.process.launch.real_launchers < [[WORD of `accelerate launch`, ...], ...]

A process of its own, because it imports torch.
"""

import argparse
import json
import os
import sys


def options(parser):
    """Option -> how many values it takes."""
    return {name: _num_values(action) for action in parser._actions for name in action.option_strings}


def _num_values(action):
    return 0 if action.nargs == 0 else 1


def deepspeed_parser():
    """The parser of DeepSpeed's launcher, which it makes and uses in one function."""
    from deepspeed.launcher import runner

    made = []
    real = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = lambda self, args=None: made.append(self) or real(self, ["x"])
    runner.parse_args([])
    argparse.ArgumentParser.parse_args = real
    return made[0]


def variables(words):
    """What `accelerate launch` sets for the ranks of a command."""
    from accelerate.commands import launch
    from accelerate.utils import launch as utils

    args = launch.launch_command_parser().parse_args([*words, "train.py"])
    args, defaults, from_config = launch._validate_launch_command(args)
    if args.use_deepspeed and not args.cpu:
        fields = [*(defaults.deepspeed_config if defaults else ()), *(["mixed_precision"] if from_config else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        env = utils.prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp or args.multi_gpu:
        env = utils.prepare_multi_gpu_env(args)
    else:
        env = utils.prepare_simple_launcher_cmd_env(args)[1]
    return {name: value for name, value in env.items() if os.environ.get(name) != value}


def main():
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    asked = json.load(sys.stdin)
    found = {
        "torchrun": options(get_args_parser()),
        "accelerate": options(launch_command_parser()),
        "deepspeed": options(deepspeed_parser()),
        "variables": [variables(words) for words in asked],
    }
    sys.stdout.write("\n" + json.dumps(found))


if __name__ == "__main__":
    main()
