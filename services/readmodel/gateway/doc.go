// Package gateway is what people talk to: their sessions, their questions and their commands.
//
// It owns readmodel.person and readmodel.person_session, QueryService, CommandService and PeopleService. It believes a bearer token whose hash is stored and alive by the database's clock,
// and decides nothing about nodes, workspaces or policy: questions are answered from package view, commands go to their owner with a signed assertion of
// the person, and the owner authorises. It stores no token and logs none.
//
// Guarantees: no method answers without a live session and one of its roles; a name or an id that belongs to another tenant is answered as one that does
// not exist; who is refused for the roles stands in the audit log, a flood of it as a count; a read with min_pos shows the command that answered it, or
// says that it cannot yet.
package gateway
