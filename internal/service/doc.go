// Package service holds the common part of every service process of the mesh: its identity, its two database roles, its
// part in numbering events, its view of the policy, its internal port and its ops port.
//
// It owns wiring and nothing else; a service adds its own parts as tasks. Guarantees: no task runs before everything is
// built; Base closes everything that it opened, after the tasks that use it have ended.
//
// It is a package of its own because four services are built in the same way and may not import each other; it imports
// nearly all of internal, so nothing of internal may import it.
package service
