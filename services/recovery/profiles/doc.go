// Package profiles owns the versions of profiles: the endpoints and trust that nodes are given, each content of a name
// under a number of its own, and which of them is offered, given at enrolment, or not valid any more.
//
//	set ──► announced ──► active ──► retiring ──► retired
//	             └────────────────────►┘            │
//	             ▲                                  │
//	             └────────── set again ─────────────┘
//
// It believes its rows alone; each replica has a Book of them, which it reads again when their revision has changed.
// Nodes decide nothing here: what they report is counted by package drift's rows.
//
// Guarantees: at most one version of a name is announced and at most one is active; a version that nodes were given is
// valid until a person retires it, so that a change that is cut at any point leaves each node with endpoints and trust
// that count; the same content of a name is the same version, whichever replica or person sets it; the version that is
// offered has the highest number of its name, so a content that is offered again after another one is given a new
// number, and nodes that have the other one take it. The configured profile becomes a version by itself, active at
// once, when the configuration differs from what it last said and its trust verifies its own endpoints.
package profiles
