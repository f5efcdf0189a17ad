// Package status decides what people are told of a node, an agent, a workspace, its workloads, a task and a run, from
// facts that others have read.
//
// Its functions are pure: they read no database and no clock. They conclude neither health nor failure from the silence
// of a node. Recovery judges nodes; of a node without its verdict, a status shows whether it is connected.
package status
