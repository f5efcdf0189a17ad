// Package provision has the steps of the sagas (Do, Undo, Observe), and the definitions that are made of them:
// provision, recreate, decommission and the two releases. A step claims what it makes before it makes it, and finds it
// again after a crash. It takes the placement drivers' lists as the truth about launched instances, agents' results
// about what was done on a node, and recovery about identities, which it requests and never changes.
package provision
