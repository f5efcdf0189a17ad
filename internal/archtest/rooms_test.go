package archtest

import "slices"

// rooms are the walls between the packages of lifecycle, each of which decides one thing.
func rooms() []wall {
	const l = "services/lifecycle/"
	steps := []string{l + "provision", l + "reap", l + "schema", l + "task"}
	return []wall{
		{
			name: "what a workspace holds knows no step and nothing that is reaped",
			from: []string{l + "allocation", l + "spec"}, to: steps,
		},
		{name: "steps know nothing of reaping", from: []string{l + "provision"}, to: []string{l + "reap"}},
		{name: "reaping knows no step", from: []string{l + "reap"}, to: []string{l + "provision"}},
		{
			name: "the saga core knows a workspace by its row alone", from: []string{l + "saga"},
			to: slices.Concat(steps, []string{l + "allocation", l + "spec", l + "placement"}),
		},
		{
			name: "the records of claims know nothing that writes them", from: []string{l + "claims"},
			to: slices.Concat(steps, []string{l + "allocation", l + "spec", l + "placement", l + "saga", l + "gate"}),
		},
	}
}

// runtimeRooms are the walls between the packages of the agent's runtime: process supervises, and knows the others.
func runtimeRooms() []wall {
	const r = "agent/runtime/"
	return []wall{
		{
			name: "isolation knows no output and no supervision", from: []string{r + "isolation"},
			to: []string{r + "jsonfile", r + "output", r + "process"},
		},
		{
			name: "output knows no isolation and no supervision", from: []string{r + "output"},
			to: []string{r + "isolation", r + "process", r + "procfs"},
		},
		{
			name: "identities of processes and files know no workload",
			from: []string{r + "filelock", r + "jsonfile", r + "procfs"},
			to:   []string{r + "isolation", r + "output", r + "process", r + "uid"},
		},
	}
}

// gatewayRooms are the walls between the packages of readmodel's gateway: queries see the others, and the others see
// what a caller may read alone.
func gatewayRooms() []wall {
	const g = "services/readmodel/gateway"
	return []wall{
		{
			name: "what a caller may read knows no server", from: []string{g + "/caller"},
			to: []string{g + "/forward", g + "/people", g + "/meshstatus"}, product: true,
		},
		{
			name: "people know no command and no status", from: []string{g + "/people"},
			to: []string{g + "/forward", g + "/meshstatus"}, product: true,
		},
		{
			name: "commands know no session and no status", from: []string{g + "/forward"},
			to: []string{g + "/people", g + "/meshstatus"}, product: true,
		},
		{
			name: "the status knows no owner and no session", from: []string{g + "/meshstatus"},
			to: []string{g + "/forward", g + "/people"}, product: true,
		},
	}
}

// clientRooms are the walls between the packages of the command line's client. Commands are cut by their noun; a noun
// may use the records and the operations, and no other.
func clientRooms() []wall {
	const c = "cmd/gpuaas/client/"
	nouns := []string{
		c + "controlplane", c + "inventory", c + "nodes", c + "operations", c + "people", c + "profiles", c + "records",
		c + "tokens", c + "workspaces",
	}
	all := []wall{
		{
			name: "what each command of the client uses knows no command",
			from: []string{c + "human", c + "exit", c + "output", c + "kit"}, to: nouns, product: true,
		},
		{
			name: "the client's output knows no session", from: []string{c + "human", c + "exit", c + "output"},
			to: []string{c + "kit", c + "contexts"}, product: true,
		},
	}
	for _, noun := range nouns {
		others := slices.DeleteFunc(slices.Clone(nouns),
			func(o string) bool { return o == noun || o == c+"records" || o == c+"operations" })
		all = append(all, wall{
			name: noun + " uses no other noun but records and operations", from: []string{noun},
			to: others,
		})
	}
	return all
}

// rpcRooms are the walls between the packages of rpc: the port knows the guard and what the guard needs, and the
// client's side knows neither.
func rpcRooms() []wall {
	const r = "internal/rpc/"
	return []wall{
		{
			name: "what a message may hold knows no caller", from: []string{r + "codec", r + "descriptors"},
			to: []string{r + "assertion", r + "calls", r + "guard", r + "port"},
		},
		{
			name: "an assertion knows no method that needs it", from: []string{r + "assertion"},
			to: []string{r + "calls", r + "codec", r + "guard", r + "port"}, product: true,
		},
		{
			name: "the side that calls knows nothing of the side that serves", from: []string{r + "calls"},
			to: []string{r + "codec", r + "guard", r + "port"}, product: true,
		},
		{
			name: "the guard knows no port", from: []string{r + "guard"}, to: []string{r + "calls", r + "port"},
		},
		{name: "a port makes no calls", from: []string{r + "port"}, to: []string{r + "calls"}, product: true},
	}
}

// sessionRooms are the walls between the packages of the agent's session, which alone knows the others.
func sessionRooms() []wall {
	const s = "agent/session/"
	return []wall{
		{
			name: "the queue of frames knows no connection", from: []string{s + "outbox"},
			to: []string{s + "transport", s + "memory", "agent/identity"},
		},
		{
			name: "the connection knows no frame that waits and no identity", from: []string{s + "transport"},
			to: []string{s + "outbox", s + "memory", "agent/identity", "gen/gpuaas/node/v1"},
		},
	}
}

// drillRooms are the walls between the packages of drills. What the host shows proves that a fault took effect, so it
// is read without code of the programs that the fault is injected into.
func drillRooms() []wall {
	const k = "drill/kit"
	return []wall{
		{name: "what drills are made of knows no drill", from: []string{k}, to: []string{"drill"}},
		{
			name: "stages, waits, the host and the mesh of drills know no run",
			from: []string{k + "/stage", k + "/await", k + "/host", k + "/mesh"}, to: []string{k},
		},
		{
			name: "drills read the host without what runs there", from: []string{k + "/stage", k + "/await", k + "/host"},
			to: slices.Concat([]string{k, "mesh", "agent"}, services),
		},
	}
}

// readingRooms are the walls between the packages of readmodel that read for people: view reads, and knows the others.
func readingRooms() []wall {
	const r = "services/readmodel/"
	readers := []string{r + "view", r + "watch", r + "gateway", r + "escalation"}
	return []wall{
		{
			name: "the audit log and the projections know no reader", from: []string{r + "auditlog", r + "project"},
			to: append([]string{r + "list", r + "lookup", r + "status"}, readers...), product: true,
		},
		{
			name: "the status of an object knows neither lists nor references", from: []string{r + "status"},
			to: append([]string{r + "list", r + "lookup"}, readers...), product: true,
		},
		{
			name: "lists know no list", from: []string{r + "list"},
			to: append([]string{r + "lookup", r + "project", r + "status"}, readers...), product: true,
		},
		{
			name: "references know no status and no reader", from: []string{r + "lookup"},
			to: append([]string{r + "status"}, readers...), product: true,
		},
	}
}

// identityRooms are the walls around the package that decides about nodes.
func identityRooms() []wall {
	const r = "services/recovery/"
	return []wall{{
		name: "identities know neither who enrols nor how lifecycle is told", from: []string{r + "identity"},
		to: []string{r + "authority", r + "enrol", r + "fences", r + "instance"}, product: true,
	}, {
		name: "sessions, keys and their nodes are decided without the records of nodes",
		from: []string{r + "identity/judge", r + "identity/opened", r + "identity/joinkeys", r + "identity/keyowner"},
		to:   []string{r + "identity"}, product: true,
	}, {
		name: "which instance may enrol is decided without knowing how one does", from: []string{r + "instance"},
		to: []string{r + "enrol", r + "tokens"}, product: true,
	}, {
		name: "roots and signing issuers are kept without knowing why",
		from: []string{r + "trust/roots", r + "trust/signing"},
		to:   []string{r + "trust", r + "trust/canary"}, product: true,
	}, {
		name: "what follows from evidence is decided without knowing how it is kept", from: []string{r + "drift"},
		to: []string{r + "drift/collect", r + "drift/judge"}, product: true,
	}, {
		name: "evidence is kept without knowing the verdicts", from: []string{r + "drift/collect"},
		to: []string{r + "drift/judge"}, product: true,
	}, {
		name: "agents are asked for records without knowing the verdicts", from: []string{r + "drift/ask"},
		to: []string{r + "drift/judge"}, product: true,
	}}
}

func findingsRooms() []wall {
	const f = "services/lifecycle/findings/"
	return []wall{
		{
			name: "how findings are kept and tables are read knows no detector", from: []string{f + "finding", f + "scan"},
			to: []string{f + "detect", f + "guard"}, product: true,
		},
		{name: "reading tables in pages knows no finding", from: []string{f + "scan"}, to: []string{f + "finding"}},
		{name: "detectors do not use the drift guard", from: []string{f + "detect"}, to: []string{f + "guard"}},
		{name: "the drift guard uses no other detector", from: []string{f + "guard"}, to: []string{f + "detect"}},
	}
}

func taskRooms() []wall {
	const t = "services/lifecycle/task/"
	return []wall{
		{name: "reports of tasks offer none", from: []string{t + "report"}, to: []string{t + "dispatch"}, product: true},
	}
}

// operationRooms are the walls around what decides whether an operation may begin: what it asks does not know it.
func operationRooms() []wall {
	const l = "services/lifecycle/"
	above := []string{l + "operation", l + "provision", l + "reap", l + "schema", l + "task"}
	return []wall{
		{
			name: "tenants know no operation and nothing that one makes", from: []string{l + "tenants"},
			to: slices.Concat(above, []string{l + "allocation", l + "outputs", l + "readiness", l + "spec"}),
		},
		{
			name: "whether workloads are ready is decided from reports alone", from: []string{l + "readiness"},
			to: slices.Concat(above, []string{l + "allocation", l + "gate", l + "claims", "internal/pg"}),
		},
		{name: "reading output begins no operation", from: []string{l + "outputs"}, to: above},
	}
}

// sagaRooms are the walls between the packages of the saga core.
func sagaRooms() []wall {
	const l = "services/lifecycle/"
	return []wall{
		{
			name: "the rows of runs know nothing that writes them", from: []string{l + "saga/runs"},
			to: []string{l + "saga", l + "claims"}, product: true,
		},
		{
			name: "the rows of workspaces know no run", from: []string{l + "workspace"},
			to: []string{l + "saga", l + "claims", l + "allocation", l + "spec", l + "task"}, product: true,
		},
		{
			name: "steps and requests know no lease and no driver",
			from: []string{
				l + "allocation", l + "claims", l + "findings", l + "gate", l + "operation", l + "provision", l + "readiness",
				l + "reap", l + "schema", l + "task",
			},
			to: []string{l + "saga/drive", l + "saga/lease"}, product: true,
		},
	}
}
