package plans

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/mesh/internal/pg"
)

// Size is the size of a fleet.
type Size struct {
	Nodes, Workspaces int
	// Tenants is one for each hundred workspaces if it is 0.
	Tenants int
	// Events reports whether the history is loaded too: it is most of the rows.
	Events bool
	// Ended is how many workspaces have been recreated and decommissioned, and Days over how many days their ends lie.
	// The source of the template must have had one end.
	Ended, Days int
	// Schemas reports whether the workload database gets the schemas of the workspaces, if a mesh is to run on the fleet.
	Schemas bool
	// Instances reports whether the machines are instances, one for each workspace. Those of the template must be.
	Instances bool
}

func (s Size) tenants() int {
	if s.Tenants > 0 {
		return s.Tenants
	}
	return max(1, s.Workspaces/100)
}

// piece is a part of a row: text that each copy has, or an id or a name that each copy has its own of.
type piece struct {
	text   string
	token  string
	form   form
	naming int // index of the token's naming in the copier
}

// form is the spelling of an id in a row.
type form int

const (
	plain   form = iota
	hexed        // the text in a binary message
	bare         // without its dashes
	hexbare      // without its dashes, in a binary message
	tail         // its last 12 digits, in the name of an instance
	hextail      // those, in a binary message
	moment       // a time
)

func (f form) of(token string) string {
	switch f {
	case hexed:
		return hex.EncodeToString([]byte(token))
	case bare:
		return strings.ReplaceAll(token, "-", "")
	case hexbare:
		return hex.EncodeToString([]byte(strings.ReplaceAll(token, "-", "")))
	case tail:
		return token[len(token)-12:]
	case hextail:
		return hex.EncodeToString([]byte(token[len(token)-12:]))
	case plain, moment:
	}
	return token
}

// mark is a text at which rows are cut, and what stands there in its place.
type mark struct {
	text string
	at   piece
}

// marks returns the texts at which rows are cut, in the order of the cuts: each id and name in each of its spellings.
func (t *Template) marks() []mark {
	var out []mark
	var instances []string // the workspaces whose instances are named by them
	for _, at := range []level{ofEnded, ofWorkspace, ofNode, ofTenant} {
		for _, token := range t.tokens(at) {
			forms := []form{plain, hexed}
			if uuids.MatchString(token) {
				forms = append(forms, bare, hexbare)
				if t.instances && at >= ofWorkspace {
					instances = append(instances, token)
				}
			}
			for _, f := range forms {
				out = append(out, mark{f.of(token), piece{token: token, form: f}})
			}
		}
	}
	for _, token := range instances {
		for _, f := range []form{tail, hextail} {
			out = append(out, mark{f.of(token), piece{token: token, form: f}})
		}
	}
	// The names of schemas have the names of tenant and workspace with other separators.
	for _, name := range []string{endedName, workspaceName, tenantName} {
		out = append(out, mark{strings.ReplaceAll(name, "-", "_"), piece{token: name, form: -1}})
	}
	return out
}

// split cuts a row at the ids and names that copies replace.
func (t *Template) split(row string) []piece {
	t.marked.Do(func() { t.cuts = t.marks() })
	parts := []piece{{text: row}}
	for _, m := range t.cuts {
		if strings.Contains(row, m.text) { // most rows have few of them
			parts = cut(parts, m.text, m.at)
		}
	}
	return parts
}

func cut(parts []piece, text string, at piece) []piece {
	var out []piece
	for _, p := range parts {
		if p.token != "" {
			out = append(out, p)
			continue
		}
		for i, part := range strings.Split(p.text, text) {
			if i > 0 {
				out = append(out, at)
			}
			if part != "" {
				out = append(out, piece{text: part})
			}
		}
	}
	return out
}

// copier writes the copies of one table.
type copier struct {
	size  Size
	table table
	rows  [][]piece
	level []level
	slot  int // the column that has the slot; -1: none
	seq   int // the column that numbers rows; -1: none

	namings []naming // of the tokens in rows
	own     []string // what the copy that is written has in their place; empty: not known yet
	written int
}

func (t *Template) copier(tab table, size Size) *copier {
	c := &copier{size: size, table: tab, slot: -1, seq: -1}
	for i, name := range tab.columns {
		switch {
		case name == "slot":
			c.slot = i
		case name == "seq" && tab.name == "events.event":
			c.seq = i
		}
	}
	for _, row := range tab.rows {
		at := ofMesh
		if copied(tab.name) {
			at = t.levelOf(row)
		}
		pieces := []piece{{text: row}}
		switch {
		case at == ofEnded && size.Ended == 0:
			continue
		case at == ofEnded:
			pieces = t.splitEnded(tab, row)
		case at > ofMesh:
			pieces = t.split(row)
		}
		c.rows, c.level = append(c.rows, pieces), append(c.level, at)
	}
	c.nameTokens(t.levels)
	return c
}

// nameTokens gives each token of the rows its naming.
func (c *copier) nameTokens(levels map[string]level) {
	known := map[string]int{}
	for _, row := range c.rows {
		for i, p := range row {
			if p.token == "" {
				continue
			}
			at, ok := known[p.token]
			if !ok {
				at = len(c.namings)
				known[p.token] = at
				c.namings = append(c.namings, newNaming(p, levels[p.token]))
			}
			row[i].naming = at
		}
	}
	c.own = make([]string, len(c.namings))
}

// number returns which object of a level the copy with the given number of another level belongs to.
func (s Size) number(of, at level, n int) int {
	switch {
	case of == at:
		return n
	case at != ofWorkspace && at != ofEnded:
		return 0
	case of == ofTenant:
		return n % s.tenants()
	case of == ofNode:
		return n % s.Nodes
	}
	return 0
}

func (s Size) copies(at level) int {
	switch at {
	case ofMesh:
		return 1
	case ofTenant:
		return s.tenants()
	case ofNode:
		return s.Nodes
	case ofWorkspace:
		return s.Workspaces
	case ofEnded:
		return s.Ended
	}
	return 0
}

// order is the order of the levels in a table: rows of ended workspaces come first.
var order = []level{ofEnded, ofMesh, ofTenant, ofNode, ofWorkspace}

// write writes all copies, those of one object together, in the order of their numbers, and of those that have ended
// the oldest first.
func (c *copier) write(w io.Writer) error {
	for _, at := range order {
		if !slices.Contains(c.level, at) {
			continue
		}
		copies := c.size.copies(at)
		for n := range copies {
			if at == ofEnded {
				n = copies - 1 - n
			}
			if err := c.writeOne(w, at, n); err != nil {
				return err
			}
		}
	}
	return nil
}

// writeOne writes the rows of one object.
func (c *copier) writeOne(w io.Writer, at level, n int) error {
	clear(c.own)
	var b []byte
	for i, row := range c.rows {
		if c.level[i] != at {
			continue
		}
		b = b[:0]
		for _, p := range row {
			if p.token == "" {
				b = append(b, p.text...)
				continue
			}
			if c.own[p.naming] == "" {
				c.own[p.naming] = c.name(c.namings[p.naming], at, n)
			}
			if p.form < 0 {
				b = append(b, strings.ReplaceAll(c.own[p.naming], "-", "_")...)
				continue
			}
			b = append(b, p.form.of(c.own[p.naming])...)
		}
		c.written++
		if c.slot >= 0 || c.seq >= 0 {
			b = []byte(c.renumber(string(b), n, c.written, at))
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	return nil
}

// name returns the text that replaces a token in the copy with the given number.
func (c *copier) name(t naming, at level, n int) string {
	if t.form == moment {
		return c.size.moment(t.token, n)
	}
	number := c.size.number(t.level, at, n)
	return t.of(number, c.size.earlier(t.level, number))
}

// renumber sets the columns whose numbers differ between copies.
func (c *copier) renumber(row string, n, seq int, at level) string {
	fields := strings.Split(row, "\t")
	if c.slot >= 0 && at == ofWorkspace {
		fields[c.slot] = strconv.Itoa(n / c.size.Nodes)
	}
	if c.seq >= 0 {
		fields[c.seq] = strconv.Itoa(seq)
	}
	return strings.Join(fields, "\t")
}

// slots returns how many slots each machine has: one more than are used, so that a new workspace finds one.
func (s Size) slots() int { return (s.Workspaces+s.Nodes-1)/s.Nodes + 1 }

// Load replaces the rows of a migrated database by copies of the template; url logs in as the administrator. Nothing
// else may use the database.
func (t *Template) Load(ctx context.Context, url string, size Size) error {
	if size.Instances != t.instances || t.instances && size.Nodes != size.Workspaces {
		return errors.New("each workspace of a fleet of instances has a machine of its own, as that of the template has")
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return fmt.Errorf("connect to the database of the fleet: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx)) // what is not committed is not wanted
	for _, s := range []*pg.Statement{asProduct, withoutKeys} {
		if _, err := pg.Exec(ctx, conn, s); err != nil {
			return fmt.Errorf("prepare to load the fleet: %w", err)
		}
	}
	// In one transaction: a server whose log is minimal does not log rows that are loaded into a table that the
	// transaction has emptied.
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error { return t.loadAll(ctx, tx.Conn(), size) })
	if err != nil {
		return err
	}
	return t.finish(ctx, conn, size)
}

// loadAll replaces the rows of every table.
func (t *Template) loadAll(ctx context.Context, conn *pgx.Conn, size Size) error {
	var all []string
	for _, tab := range t.tables {
		all = append(all, tab.name)
	}
	if _, err := conn.PgConn().Exec(ctx, "TRUNCATE "+strings.Join(all, ", ")).ReadAll(); err != nil {
		return fmt.Errorf("empty the database of the fleet: %w", err)
	}
	for _, tab := range t.tables {
		if len(tab.rows) == 0 || tab.name == "events.numbered" || tab.name == "events.event" && !size.Events {
			continue
		}
		if err := t.loadTable(ctx, conn, tab, size); err != nil {
			return err
		}
	}
	if _, err := pg.Exec(ctx, conn, markSeeded); err != nil {
		return fmt.Errorf("mark the database of the fleet: %w", err)
	}
	return nil
}

// copies returns the copies of a table in the format of COPY. They come in large pieces: each is a message to the
// server, and a change between two goroutines.
func (t *Template) copies(tab table, size Size) *io.PipeReader {
	const most = 64 << 10
	read, write := io.Pipe()
	c := t.copier(tab, size)
	go func() {
		buffered := bufio.NewWriterSize(write, most)
		write.CloseWithError(errors.Join(c.write(buffered), buffered.Flush()))
	}()
	return read
}

func (t *Template) loadTable(ctx context.Context, conn *pgx.Conn, tab table, size Size) error {
	read := t.copies(tab, size)
	_, err := conn.PgConn().CopyFrom(ctx, read, "COPY "+tab.name+" ("+strings.Join(tab.columns, ", ")+") FROM STDIN")
	read.CloseWithError(err)
	if err != nil {
		return fmt.Errorf("load %s: %w", tab.name, err)
	}
	return nil
}
