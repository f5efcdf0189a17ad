package plans

import (
	"strings"
	"time"
)

// EndedOf is the share of a fleet's workspaces that have ended on each day of its history, each after a recreate.
const EndedOf = 0.01

// HistoryOf returns how many workspaces have ended in a fleet of that many workspaces within that many days.
func HistoryOf(workspaces, days int) int { return int(EndedOf * float64(workspaces*days)) }

// endedName is the name of the workspace of a template that has ended.
const endedName = "e-00000000"

// times is how COPY writes a time.
const times = "2006-01-02 15:04:05.999999-07"

// earlier returns how many seconds before the template's the times of a copy are: those of ended workspaces lie over
// the days of the history.
func (s Size) earlier(at level, n int) int {
	if at != ofEnded || s.Ended == 0 {
		return n
	}
	return int(int64(n) * int64(max(1, s.Days)) * 24 * 3600 / int64(s.Ended))
}

// moment returns a time of an ended workspace.
func (s Size) moment(text string, n int) string {
	at, err := time.Parse(times, text)
	if err != nil {
		return text // infinity
	}
	return at.Add(-time.Duration(s.earlier(ofEnded, n)) * time.Second).Format(times)
}

// splitEnded cuts a row at the ids, the names and the times that copies replace.
func (t *Template) splitEnded(tab table, row string) []piece {
	var parts []piece
	line, newline, _ := strings.Cut(row, "\n")
	for i, field := range strings.Split(line, "\t") {
		if i > 0 {
			parts = append(parts, piece{text: "\t"})
		}
		if tab.types[i] == "timestamp with time zone" && field != `\N` {
			parts = append(parts, piece{token: field, form: moment})
			continue
		}
		parts = append(parts, t.split(field)...)
	}
	return append(parts, piece{text: newline + "\n"})
}
