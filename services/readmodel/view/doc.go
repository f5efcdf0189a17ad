// Package view makes the answers for people from projected rows: nodes, workspaces, timelines, tasks and lists of them.
//
// It trusts the projection and the database's clock, and nothing else: it concludes neither health nor failure from the
// silence of a node. It owns no table and writes nothing. Recovery decides on drift; without its verdict, Describe
// returns the status that the facts alone support.
//
// Guarantees: every read is one snapshot of the database with one time, ends within its time limit, and is scoped: a
// person of a tenant sees only that tenant's rows, and an object of another tenant is answered exactly as one that does
// not exist. Describe and the functions like it are pure.
package view
