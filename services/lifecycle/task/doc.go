// Package task has the tasks of agents as they are stored: their rows and events, how one is queued, how long it may
// start, which types may be done twice, and how a lease that no event has reported is reported later.
//
// It never runs anything and never decides which tasks a workspace needs. Package dispatch offers tasks to the sessions
// of their nodes, and package report applies what agents say of them.
package task
