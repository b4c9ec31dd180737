"""What `wisp serve` takes for vLLM's arguments, read from its source, are vLLM's arguments."""

from services.preflight_engine import argument_types


def test_every_argument_of_vllm_is_known() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = vars(make_arg_parser(FlexibleArgumentParser()).parse_args([]))
    assert set(arguments) - argument_types().keys() <= {"model_tag"}, "the positional one"
