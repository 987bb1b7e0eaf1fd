"""What the scripts of a deployment check before they start a program of somebody else's."""


def need_program(program: str, *, install: str) -> str:
    """Lines of a shell script that end it with a reason where a program is not on the PATH.

    Args:
        program: Name of the program.
        install: What to do then.
    """
    return f"""\
command -v {program} > /dev/null || {{
  echo "privfed: {program} is not on the PATH; nothing was started; {install}" >&2
  exit 1
}}
"""


def need_python(program: str, *, module: str, extra: str) -> str:
    """Lines of a shell script that end it with a reason where there is no Python, or it lacks privfed or the engine.

    Args:
        program: How the script calls Python.
        module: The engine's module.
        extra: The extra of privfed that brings it.
    """
    search = f"import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, ('privfed', '{module}'))))"
    return f"""\
{need_program(program, install=f"activate the environment in which privfed[{extra}] is installed")}\
{program} -c "{search}" || {{
  echo "privfed: the {program} on the PATH has no privfed[{extra}]; nothing was started; install it there, or activate its environment" >&2
  exit 1
}}
"""
