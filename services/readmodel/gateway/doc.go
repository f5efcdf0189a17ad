// Package gateway serves the API for people: sessions, queries and commands.
//
// It owns readmodel.person and readmodel.person_session, QueryService, CommandService and PeopleService. It accepts a
// bearer token whose hash is stored and whose session is alive by the database's clock, and decides nothing about
// nodes, workspaces or policy: queries are answered from package view, commands go to their owner with a signed
// assertion of the person, and the owner authorises them. It stores no token and logs none.
//
// Guarantees: no method answers without a live session and one of its roles; a name or an id that belongs to another
// tenant is answered as one that does not exist; a refusal for lack of a role is recorded in the audit log, and many
// refusals in a short time as a count; a read with min_pos includes the effect of the command that returned that
// position, or fails with position_not_reached.
package gateway
