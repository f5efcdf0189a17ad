// Package people has the people who may call the API, their roles and their sessions.
//
// It owns readmodel.person and readmodel.person_session, and serves PeopleService. It accepts a bearer token whose hash
// is stored and whose session is alive by the database's clock. It decides who may create a person, which roles that
// person may have, and that one person with the role security remains. It knows no query and no command, stores no
// token and logs none.
//
// Guarantees: a person is authenticated by a live session alone; a check of a session reads its row after the check
// began, although several checks share a statement.
package people
