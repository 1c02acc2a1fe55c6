//! What a query reads: which properties it filters and orders by, which functions it calls, which parameters it needs.

use super::error::SyntaxError;
use super::syntax::{Collection, Expression, Function, Name, Select, Selection, Sort, Source, Step};
use super::{Argument, Call, Query, SortKey};

/// The step of a path that stands for the elements of an array.
pub(crate) const ELEMENTS: &str = "[]";

const AGGREGATES: &[&str] =
    &["ARRAY_AGG", "AVG", "COUNT", "COUNTIF", "DCOUNT", "MAKELIST", "MAKESET", "MAX", "MIN", "SUM"];

/// From the document to a value in it; `None` where only the query's execution knows the value.
type Path = Option<Vec<String>>;

/// Reads a tree, and refuses names that stand for nothing.
pub(super) fn read(select: &Select) -> Result<Query, SyntaxError> {
    let mut reader = Reader { query: Query::default(), unresolved: None };
    let scope = reader.select(select, &Scope::default(), Role::Source);
    let sort = |sort: &Sort| SortKey { path: path_of(&sort.key, &scope), descending: sort.descending };
    let mut query = reader.query;
    query.order_by = select.order_by.iter().map(sort).collect();
    query.has_top = select.top.is_some();
    query.has_offset = !select.window.is_empty();
    query.has_distinct = select.distinct;
    query.has_group_by = !select.group_by.is_empty();
    query.has_aggregate = selected(&select.selection).iter().any(has_aggregate);
    match reader.unresolved {
        Some(name) => Err(SyntaxError::unresolved(name.start, &name.name)),
        None => Ok(query),
    }
}

/// The names that FROM and JOIN have introduced, inner ones last.
#[derive(Clone, Default)]
struct Scope {
    names: Vec<(String, Path)>,
}

impl Scope {
    fn find(&self, name: &str) -> Option<&Path> {
        self.names.iter().rev().find(|(known, _)| known == name).map(|(_, path)| path)
    }

    fn add(&mut self, name: String, path: Path) {
        self.names.push((name, path));
    }
}

/// What a SELECT is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The whole query, or an input of it.
    Source,
    /// Part of a filter.
    Filter,
    /// Part of the result: its own filters choose no documents.
    Projection,
}

struct Reader {
    query: Query,
    /// The first name that stands for nothing.
    unresolved: Option<Name>,
}

impl Reader {
    /// Reads a SELECT inside `outer` and returns its names.
    fn select(&mut self, select: &Select, outer: &Scope, role: Role) -> Scope {
        let mut scope = outer.clone();
        for collection in &select.from {
            // Without a filter of its own, a subquery in a filter asks for the elements of its input.
            let filters = role == Role::Filter && select.filter.is_none();
            self.collection(collection, &mut scope, role, filters);
        }
        let selected = selected(&select.selection).iter().chain(&select.top);
        for expression in selected.chain(&select.group_by).chain(&select.window) {
            self.expression(expression, &scope, false);
        }
        for sort in &select.order_by {
            self.expression(&sort.key, &scope, false);
        }
        if let Some(filter) = &select.filter {
            self.expression(filter, &scope, role != Role::Projection);
        }
        scope
    }

    /// Reads an input and adds its name to the scope.
    fn collection(&mut self, collection: &Collection, scope: &mut Scope, role: Role, filters: bool) {
        let mut path = match &collection.source {
            Source::Path { root, steps } => self.source(root, steps, scope),
            Source::Query(select) => {
                let inner = self.select(select, scope, role);
                value_of(select, &inner)
            }
        };
        if collection.iterates {
            path = path.map(|path| extended(path, ELEMENTS));
        }
        if filters {
            self.filter(&path);
        }
        if let Some(name) = collection.alias.clone().or_else(|| own_name(&collection.source)) {
            scope.add(name, path);
        }
    }

    /// The first input of all is the container, whatever it is called. Every other one begins at a name.
    fn source(&mut self, root: &Name, steps: &[Step], scope: &Scope) -> Path {
        let start = match scope.find(&root.name) {
            Some(path) => path.clone(),
            None if scope.names.is_empty() => Some(Vec::new()),
            None => {
                self.resolve(root, scope);
                None
            }
        };
        walked(start, steps)
    }

    fn expression(&mut self, expression: &Expression, scope: &Scope, filters: bool) {
        if filters {
            self.filter(&path_of(expression, scope));
        }
        match expression {
            Expression::Literal | Expression::Text(_) => {}
            Expression::Parameter(name) => self.parameter(name),
            Expression::Name(name) => self.resolve(name, scope),
            Expression::Member { base, steps } => self.member(base, steps, scope, filters),
            Expression::Call(call) => self.call(call, scope, filters),
            Expression::Subquery(select) => {
                self.select(select, scope, if filters { Role::Filter } else { Role::Projection });
            }
            Expression::Parts(parts) => self.all(parts, scope, filters),
        }
    }

    fn all(&mut self, expressions: &[Expression], scope: &Scope, filters: bool) {
        for expression in expressions {
            self.expression(expression, scope, filters);
        }
    }

    fn member(&mut self, base: &Expression, steps: &[Step], scope: &Scope, filters: bool) {
        // The path as a whole is read already, unless it begins at something other than a name.
        let begins_at_name = matches!(base, Expression::Name(_));
        self.expression(base, scope, filters && !begins_at_name);
        for step in steps {
            if let Step::Computed(index) = step {
                self.expression(index, scope, filters);
            }
        }
    }

    fn call(&mut self, call: &Function, scope: &Scope, filters: bool) {
        let arguments = call.arguments.iter().map(|argument| argument_of(argument, scope)).collect();
        self.query.calls.push(Call { name: call.name.clone(), is_udf: call.is_udf, arguments });
        self.all(&call.arguments, scope, filters);
    }

    fn parameter(&mut self, name: &str) {
        if !self.query.parameters.iter().any(|known| known == name) {
            self.query.parameters.push(name.to_owned());
        }
    }

    fn filter(&mut self, path: &Path) {
        if let Some(path) = path.as_ref().filter(|path| !path.is_empty()) {
            if !self.query.filters.contains(path) {
                self.query.filters.push(path.clone());
            }
        }
    }

    fn resolve(&mut self, name: &Name, scope: &Scope) {
        if scope.find(&name.name).is_none() && self.unresolved.is_none() {
            self.unresolved = Some(name.clone());
        }
    }
}

fn selected(selection: &Selection) -> &[Expression] {
    match selection {
        Selection::Star => &[],
        Selection::Value(value) => std::slice::from_ref(value),
        Selection::List(items) => items,
    }
}

/// The path that a SELECT VALUE yields.
fn value_of(select: &Select, scope: &Scope) -> Path {
    match &select.selection {
        Selection::Value(value) => path_of(value, scope),
        _ => None,
    }
}

/// The name of an input without alias: the last property on its way.
fn own_name(source: &Source) -> Option<String> {
    let Source::Path { root, steps } = source else { return None };
    match steps.last() {
        None => Some(root.name.clone()),
        Some(Step::Property(name)) => Some(name.clone()),
        Some(_) => None,
    }
}

fn path_of(expression: &Expression, scope: &Scope) -> Path {
    match expression {
        Expression::Name(name) => scope.find(&name.name).cloned().flatten(),
        Expression::Member { base, steps } => walked(path_of(base, scope), steps),
        _ => None,
    }
}

/// Walks as far as the steps are known: the value is in there.
fn walked(start: Path, steps: &[Step]) -> Path {
    let mut path = start?;
    for step in steps {
        match step {
            Step::Property(name) => path.push(name.clone()),
            Step::Element => path.push(ELEMENTS.to_owned()),
            Step::Computed(_) => break,
        }
    }
    Some(path)
}

fn extended(mut path: Vec<String>, step: &str) -> Vec<String> {
    path.push(step.to_owned());
    path
}

fn argument_of(argument: &Expression, scope: &Scope) -> Argument {
    match argument {
        Expression::Literal | Expression::Text(_) => Argument::Literal,
        Expression::Parameter(name) => Argument::Parameter(name.clone()),
        other => path_of(other, scope).map_or(Argument::Other, Argument::Path),
    }
}

/// Whether an expression aggregates; subqueries aggregate for themselves.
fn has_aggregate(expression: &Expression) -> bool {
    match expression {
        Expression::Call(call)
            if !call.is_udf && AGGREGATES.iter().any(|name| name.eq_ignore_ascii_case(&call.name)) =>
        {
            true
        }
        Expression::Call(call) => call.arguments.iter().any(has_aggregate),
        Expression::Parts(parts) => parts.iter().any(has_aggregate),
        Expression::Member { base, .. } => has_aggregate(base),
        _ => false,
    }
}
