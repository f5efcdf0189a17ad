package pg

import (
	"reflect"
	"strings"
)

// Columns returns the select list that One and All read a T from, for a table or alias: "r.id, r.version". A field is
// selected by the column of its `db` tag, or by the expression of its `expr` tag, in which @ stands for the alias:
//
//	Tenant string `db:"tenant" expr:"coalesce(@.tenant_id::text, '')"`
//
// Fields tagged `db:"-"` are left out; embedded structs are taken as if their fields stood in T. It panics if T is no
// struct, or a field has no tag: lists of columns are made when the program starts.
func Columns[T any](alias string) string {
	var list []string
	for _, c := range columnsOf(reflect.TypeFor[T]()) {
		switch {
		case c.expr != "":
			list = append(list, strings.ReplaceAll(c.expr, "@", alias)+" AS "+c.name)
		default:
			list = append(list, alias+"."+c.name)
		}
	}
	return strings.Join(list, ", ")
}

type column struct{ name, expr string }

func columnsOf(row reflect.Type) []column {
	if row.Kind() != reflect.Struct {
		refuse("columns of %s: not a struct", row)
	}
	var list []column
	for f := range row.Fields() {
		name := f.Tag.Get("db")
		switch {
		case name == "-":
		case name != "":
			list = append(list, column{name: name, expr: f.Tag.Get("expr")})
		case f.Anonymous && f.Type.Kind() == reflect.Struct:
			list = append(list, columnsOf(f.Type)...)
		default:
			refuse("columns of %s: field %s has no db tag", row, f.Name)
		}
	}
	return list
}
