//! duroxide's validation suite on several kinds of accounts. On containers of several physical partitions each query
//! visits all of them.

#[path = "../fixture/mod.rs"]
mod fixture;

mod backend;
mod completeness;
mod suite;

mod one_partition {
    use crate::{for_each_validation, validation_suite, validations};

    validation_suite!(Account::InProcess(1));
}

mod four_partitions {
    use crate::{for_each_validation, validation_suite, validations};

    validation_suite!(Account::InProcess(4));
}

mod sixteen_partitions {
    use crate::{for_each_validation, validation_suite, validations};

    validation_suite!(Account::InProcess(16));
}

mod without_inline_claims {
    use crate::{for_each_validation, validation_suite, validations};

    validation_suite!(Account::WithoutInlineClaims(1));
}

/// Over HTTP with an account key.
mod over_http {
    use crate::{for_each_validation, validation_suite, validations};

    validation_suite!(Account::Served(4));
}
