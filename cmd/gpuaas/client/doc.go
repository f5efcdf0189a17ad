// Package client lists the commands with which people and scripts use the mesh, and attaches them to a command line.
//
// The commands themselves are in packages by noun: workspaces, nodes, inventory, records, people and controlplane; kit,
// output, exit and human have what each of them uses.
//
// They trust the answers of the one server that proves to be the mesh's (its identity under the context's authority),
// and the contexts file if no other user may read it. They do not decide what is possible: the owners do, and their
// refusal is printed as they wrote it. They print a token only if the person asks for it as data.
//
// Guarantees: data goes to stdout, everything else to stderr; output to a pipe has no colours and no decoration; the
// exit code gives the result (see exit.CodeOf); every read that follows a command in the same run sees that command's
// effect, or the output notes that it does not.
//
//	context (contexts file, flags, environment) → connection (TLS 1.3, bearer token) → one command
//	    → printer (table, JSON, YAML, names)
package client
