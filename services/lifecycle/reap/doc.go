// Package reap ends what no workspace owns any more: instances that a placement runs and no workspace owns, and the
// directories, workloads, schemas, handles and identities that a release has given up. It ends only what the database
// gives positive evidence for.
package reap
