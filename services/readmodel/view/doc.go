// Package view makes the answers for people from projected rows: nodes, workspaces, timelines, tasks and lists of them.
//
// It trusts the projection and the database's clock, and nothing else. It owns no table and writes nothing. It reads
// facts: package status decides what they mean, package list which rows a caller gets, and package lookup which object
// a reference stands for.
//
// Guarantees: every read is one snapshot of the database with one time, ends within its time limit, and is scoped: a
// person of a tenant sees only that tenant's rows, and an object of another tenant is answered exactly as one that does
// not exist.
package view
