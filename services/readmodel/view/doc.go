// Package view makes what people are told out of projected rows: nodes, workspaces, timelines, tasks and lists of them.
//
// It believes the projection and the database's clock, and nothing else: no health is concluded from silence, and no failure either. It owns no table
// and writes nothing. Verdicts on drift are recovery's; where one is missing, Describe says what the facts alone allow.
//
// Guarantees: every read is one snapshot of the database with one time, ends within its time limit, and is scoped: a person of a tenant meets only that
// tenant's rows, and what belongs to another is answered exactly as what does not exist. Describing is pure.
package view
