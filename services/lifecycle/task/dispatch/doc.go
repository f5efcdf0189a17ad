// Package dispatch serves TaskService: it leases queued tasks to the sessions of their nodes and signs the offers,
// hints replicas of nodeapi that a node has work, and ends tasks that are cancelled, closed or too old. Every offer
// names the task and its attempt.
//
// It leases only under the gate of the node. It does not decide what an agent's report means: that is package report.
package dispatch
