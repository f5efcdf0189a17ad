package events

import (
	"encoding/hex"

	"github.com/jackc/pgx/v5/pgtype"
)

// belongsTo are the columns of the correlation as uuids, in the order of Correlation.texts: one list per column, with
// one element per event. Empty ones are NULL.
type belongsTo [8]pgtype.FlatArray[pgtype.UUID]

// belongings returns the correlations of events as uuids, and reports whether all of them are uuids: only then they are
// stored as uuids.
func belongings(evs []Event) (belongsTo, bool) {
	var out belongsTo
	for i, e := range evs {
		for column, text := range e.stored() {
			id, ok := parseUUID(text)
			if !ok && text != "" {
				return out, false
			}
			if out[column] == nil {
				out[column] = make(pgtype.FlatArray[pgtype.UUID], len(evs))
			}
			out[column][i] = id
		}
	}
	return out, true
}

// stored returns the texts of an event's correlation that are stored as uuids. If the event is a change of a task,
// aggregate_id has the task's id already, and the id is left out here, but only if another id is stored: readers of an
// earlier build recognise by a stored id that the row is not for them.
func (e Event) stored() [8]string {
	texts := e.texts()
	if e.AggregateType != "task" || e.TaskID != e.AggregateID {
		return texts
	}
	e.TaskID = ""
	if e.Correlation == (Correlation{}) {
		return texts
	}
	return e.texts()
}

// parseUUID reads the canonical spelling of a uuid, which is also how Postgres returns it. Any other text is not
// accepted.
func parseUUID(text string) (pgtype.UUID, bool) {
	var id pgtype.UUID
	if len(text) != 36 || text[8] != '-' || text[13] != '-' || text[18] != '-' || text[23] != '-' {
		return id, false
	}
	var digits [32]byte
	at := 0
	for i := range len(text) {
		switch c := text[i]; {
		case c >= '0' && c <= '9' || c >= 'a' && c <= 'f':
			if at == len(digits) {
				return id, false
			}
			digits[at] = c
			at++
		case c != '-':
			return id, false
		}
	}
	if at != len(digits) {
		return id, false
	}
	if _, err := hex.Decode(id.Bytes[:], digits[:]); err != nil {
		return id, false
	}
	id.Valid = true
	return id, true
}

// uuidValues returns the arguments of appendOneUUIDs.
func (e Event) uuidValues(c content, belongs belongsTo) []any {
	args := append(make([]any, 0, 16), e.common(c)...)
	for _, column := range belongs {
		var id pgtype.UUID
		if column != nil {
			id = column[0]
		}
		args = append(args, id)
	}
	return args
}

// uuidColumns returns the arguments of appendManyUUIDs.
func uuidColumns(evs []Event, contents []content, belongs belongsTo) []any {
	args := append(make([]any, 0, 16), commonColumns(evs, contents)...)
	for _, column := range belongs {
		args = append(args, column)
	}
	return args
}
