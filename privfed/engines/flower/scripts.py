"""The files with which the parties of a Flower deployment start: scripts, the proxy's configuration, environment files."""

from privfed.deploy.scripts import need_program, need_python

SUPERLINK_PORT = 8000
"""Of the SuperLink, on the loopback of the server's host."""
FIRST_NODE_PORT = 9094
"""Of the first party's SuperNode, on the loopback of its own host."""
NGINX_FOLDERS = "/usr/sbin:/usr/local/sbin"
"""Where nginx is, and users do not look."""

_QUIET = """\
# Nothing is reported to Flower's makers, and nothing is looked up there.
FLWR_TELEMETRY_ENABLED=0
FLWR_DISABLE_UPDATE_CHECK=1
FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.2
"""

_BEGIN = """\
#!/bin/sh
# {purpose}
set -eu
cd "$(dirname "$0")"
set -a
. ./flower.env
set +a
: "${{PRIVFED_FOLDER:=$(cd .. && pwd)}}" "${{FLWR_HOME:=$PWD/home}}"
export PRIVFED_FOLDER FLWR_HOME
"""

_NEED = need_python("python", module="flwr", extra="flower")

START_SUPERLINK = (
    _BEGIN.format(purpose="Starts the SuperLink, on this host's loopback alone, and tells it the parties' nodes. It keeps all in memory.")
    + _NEED
    + need_program("flower-superlink", install="put the folder on the PATH into which privfed[flower] was installed")
    + """\
mkdir -p "$FLWR_HOME"
chmod 700 "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<END
[superlink]
default = "consortium"

[superlink.consortium]
address = "127.0.0.1:$PRIVFED_SUPERLINK_PORT"
root-certificates = "$PWD/ca.pem"
END
python -m privfed.engines.flower.control register nodes &
exec flower-superlink --host 127.0.0.1 --port "$PRIVFED_SUPERLINK_PORT" \\
  --ssl-certfile server.pem --ssl-keyfile server.key --ssl-ca-certfile ca.pem \\
  --enable-supernode-auth --disable-runtime-dependency-installation --database :flwr-in-memory:
"""
)

START_PROXY = (
    _BEGIN.format(purpose="Starts the proxy: the only thing that the banks, or anybody else, can reach on this host.")
    + f'PATH="$PATH:{NGINX_FOLDERS}"  # where nginx is, and users do not look\n'
    + need_program("nginx", install="install it, version 1.22 or later")
    + """\
[ "$(id -u)" -ne 0 ] || {
  echo "privfed: nginx that root starts works as nobody, who cannot write here, and every update would fail; nothing was started;" \\
    "give the server's folder to an ordinary user, and start as that user" >&2
  exit 1
}
mkdir -p proxy
exec nginx -p "$PWD" -c "$PWD/nginx.conf"
"""
)

RUN = (
    _BEGIN.format(purpose="Holds the rounds that are missing, and fails loudly: run.sh ROUNDS [--time-out STEP=SECONDS ...], all rounds.")
    + _NEED
    + """\
exec python -m privfed.engines.flower.control run consortium-app --rounds "$@"
"""
)

START_NODE = (
    _BEGIN.format(purpose="Starts the party's node, which holds its keys. As the user who owns the party's folder.")
    + _NEED
    + """\
exec python -m privfed.engines.flower.party --folder "$PRIVFED_FOLDER" --socket "${PRIVFED_SOCKET:-$PWD/node.sock}"
"""
)

START_SUPERNODE = (
    _BEGIN.format(purpose="Starts the SuperNode, again and again. As another user, who can read this folder and reach the node's socket.")
    + _NEED
    + """\
node=
trap 'kill $node 2>/dev/null; exit 0' INT TERM
while true; do
  python -m privfed.engines.flower.supernode --apps apps.sha256 \\
    --superlink "$PRIVFED_SUPERLINK" --root-certificates ca.pem --auth-supernode-private-key node.key \\
    --host 127.0.0.1 --port "$PRIVFED_NODE_PORT" --node-config "socket=\\"${PRIVFED_SOCKET:-$PWD/node.sock}\\"" &
  node=$!
  ended=0
  wait $node || ended=$?
  [ $ended -ne 2 ] || exit 2
  sleep 5
done
"""
)


def start_all(first: str, second: str) -> str:
    """The script that starts both processes of a party as one user, to try it on one machine."""
    return f"""\
#!/bin/sh
# Starts both processes of this party, as one user, until one of them ends. On a host of its own, each gets its own user: see the guide.
cd "$(dirname "$0")/flower" || exit 1
trap 'kill $first $second 2>/dev/null' EXIT
trap 'exit 1' INT TERM
./{first} & first=$!
./{second} & second=$!
while kill -0 $first 2>/dev/null && kill -0 $second 2>/dev/null; do sleep 1 & wait $!; done
echo "privfed: {first} or {second} ended, as it says above; so the other one is ended too" >&2
exit 1
"""


def submit(*, rounds: int) -> str:
    """The operator's script. It runs on the server's host: the control path leads nowhere else.

    Args:
        rounds: Of the whole run.
    """
    return f"""\
#!/bin/sh
# Holds the rounds that are missing, on the server's host, and fails loudly.
exec "${{PRIVFED_SERVER:-$(dirname "$0")/../server}}/flower/run.sh" {rounds} "$@"
"""


def server_environment() -> str:
    """Environment file of the server."""
    return f"{_QUIET}PRIVFED_SUPERLINK_PORT={SUPERLINK_PORT}\n"


def party_environment(*, host: str, port: int, index: int) -> str:
    """Environment file of a bank or key holder.

    Args:
        host: Where the server's proxy is.
        port: Its port.
        index: Which party, from 0: each gets another port, so that all can be tried on one machine.
    """
    return (
        f"{_QUIET}PRIVFED_SUPERLINK={host}:{port}\nPRIVFED_NODE_PORT={FIRST_NODE_PORT + index}\n"
        "# Where the node and the SuperNode, two users, meet; left out: node.sock in this folder.\n"
        "#PRIVFED_SOCKET=/run/privfed/node.sock\n"
    )


def proxy_configuration(*, port: int) -> str:
    """Configuration of nginx: what the nodes need is passed on, and nothing else is.

    On the SuperLink's one port, the paths below /v1/control/ submit apps and unregister banks, without asking who does.

    Args:
        port: Where the proxy listens.
    """
    return f"""\
daemon off;
worker_processes 1;
pid proxy/nginx.pid;
error_log stderr warn;

events {{}}

http {{
    access_log off;
    server_tokens off;
    # Flower sends pieces of 5 MB. With nginx's own 1 MB, every update would be dropped and no round held.
    client_max_body_size 16m;
    client_body_temp_path proxy/body;
    proxy_temp_path proxy/answers;
    fastcgi_temp_path proxy/fastcgi;
    scgi_temp_path proxy/scgi;
    uwsgi_temp_path proxy/uwsgi;

    server {{
        listen {port} ssl;
        ssl_certificate server.pem;
        ssl_certificate_key server.key;
        ssl_protocols TLSv1.2 TLSv1.3;

        # With a path behind the address, what is passed on is the path that was matched, not what was written in the request.
        location /v1/fleet/ {{
            proxy_pass https://127.0.0.1:{SUPERLINK_PORT}/v1/fleet/;
            proxy_ssl_verify on;
            proxy_ssl_trusted_certificate ca.pem;
            proxy_ssl_name localhost;
            proxy_read_timeout 120s;
        }}

        location / {{
            return 403;
        }}
    }}
}}
"""
