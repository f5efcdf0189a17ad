// Package workrules holds the rules for the workloads of tenants that the control plane and the agent share: the shape
// of commands and of environment variables.
//
// It consists of pure functions. Check is called where a request comes in and again by the agent, so that both refuse
// the same.
package workrules
