// Package work has the drills of tasks and of operations on workspaces: results that are lost, a backlog, releases that
// fail, workloads that hang, and all who may replace an instance at once.
package work
