//! duroxide's validation suite in process, on containers of several physical partitions: queries visit each of them, and
//! an instance's neighbours are elsewhere.

mod validation;

mod four_partitions {
    use crate::{for_each_validation, validation_suite, validations};

    validation_suite!(Account::InProcess(4));
}

mod sixteen_partitions {
    use crate::{for_each_validation, validation_suite, validations};

    validation_suite!(Account::InProcess(16));
}
